"""What several commands share: printing, progress, options."""
