"""The larger commands of `vitray`, a file each. Importing one costs no more than click: the work is imported by its run."""
