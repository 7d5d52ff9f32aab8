"""The command line: parse, print, exit. One file a command; nothing else imports this room."""
