"""For the properties: an example has no time limit, for how long it takes is the machine's load."""

import hypothesis

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
