"""Worker registry, plan and rescue."""
