"""DreamerV3, to be read in this order:

    config           every setting
    features         what the networks make of each key of an observation and of an action
    layers, images   dense and convolutional layers
    distributions    two-hot, categorical, Bernoulli, normal
    encoder          observations to tokens
    dynamics, rssm   the contract of a sequence model, and the published one
    decoder, heads   from the features of a state to observations, rewards, values and actions
    networks         all of them together
    world_model      what it sees in a sequence, and its losses
    imagination      rollouts of the policy, and their returns
    actor_critic     the losses of policy and value
    train            one training step: the whole algorithm on one page
    optimizer        gradients to updates
    acting           one policy call

`interfaces` says what parts of your own have to offer, `forms` hides what differs between devices.
`runtime/` makes all of this run: devices, compiled programs, publishing, saving, reports. To read
or change the algorithm you do not need it.
"""
