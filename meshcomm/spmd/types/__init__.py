"""The checker of varying types: along which axes each value of a rank varies.

In: every operation of torch and every collective of a thread, while it is on. Out: the type of each value; an inserted
pvary, or an error at the line where one is missing. ``rules`` says what operations do, ``sizes`` what data decides.
"""
