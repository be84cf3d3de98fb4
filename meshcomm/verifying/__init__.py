"""What is proven of a program: that its values and derivatives are those of one device.

In: a function of global values, or a training loop. Out: a report, whose findings name the line to blame and what to
write there.
"""
