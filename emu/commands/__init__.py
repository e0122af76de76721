"""What each command of the command line does: a file a command."""
