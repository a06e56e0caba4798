"""The one exception that means "the user can fix this"."""


class UserError(ValueError):
    """A mistake in what the user asked for or supplied.

    Its message is one clear line that names what was wrong and what was got. The command line prints it
    on stderr and exits with code 2; library callers may catch it as a ValueError.
    """
