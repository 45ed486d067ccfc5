"""Example programs, and the module that starts the application for them."""
