"""What setup.py is made of. It is no part of the package: it is there while one is built."""
