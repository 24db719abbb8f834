"""What Git LFS leaves in place of a large file."""

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2201105632\n"
