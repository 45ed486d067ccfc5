"""Programs to try, and what starts the application for them."""
