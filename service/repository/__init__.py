"""The served models: what each is, how it is found, checked, loaded, proven and replaced."""
