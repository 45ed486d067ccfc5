"""What an operator may choose (`schema`), and how "auto" becomes a choice (`resolve`)."""
