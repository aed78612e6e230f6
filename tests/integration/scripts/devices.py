"""Ops pinned to a CPU and to a GPU; `--soft` lets TensorFlow take what there is, `--server` goes through a server."""

import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_boolean("soft", False, "allow_soft_placement")
flags.DEFINE_boolean("server", False, "a session of a server of its own")
FLAGS = flags.FLAGS


def main(_):
    with tf.device("/cpu:0"):
        a = tf.constant([1.0, 2.0], name="a")
    with tf.device("/gpu:0"):
        b = tf.constant([1.0, 2.0], name="b")
    target = tf.train.Server.create_local_server().target if FLAGS.server else ""
    config = tf.ConfigProto(allow_soft_placement=FLAGS.soft, log_device_placement=True)
    with tf.Session(target, config=config) as session:
        print(session.run(a + b))


if __name__ == "__main__":
    tf.app.run()
