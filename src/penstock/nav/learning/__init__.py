"""The learner.

networks.py  encoders of observations           policy.py  actor and critic on top of them
beta.py      Beta distributions                 gae.py     advantages
ppo.py       the update                         ppo_settings.py  what it is asked for
value_norm.py  the scale of values
"""
