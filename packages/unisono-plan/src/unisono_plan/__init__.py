"""What a layout needs on devices that are not here, from one step that is traced without content."""
