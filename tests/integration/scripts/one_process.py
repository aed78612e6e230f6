"""The smallest cluster there is: a server of its own in one process."""

import tensorflow as tf

greeting = tf.constant("Hello from one process")
server = tf.train.Server.create_local_server()
session = tf.Session(server.target)
print(session.run(greeting).decode())
