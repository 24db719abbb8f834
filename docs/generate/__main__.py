"""Write every generated page."""

from docs.generate.pages import FOLDER, pages

for name, text in pages().items():
    (FOLDER / name).write_text(text)
