"""What does a run do about uneven load of its experts?"""
