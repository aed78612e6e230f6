"""Two-way LSTM fed by a queue that a thread fills while the step runs; `--feed` makes each batch before its step.

Making a batch takes `--input_secs`, a step that long beside its arithmetic, so that what overlaps can be measured.
"""

import time

import numpy as np
import tensorflow as tf
from tensorflow.contrib.rnn import LSTMCell

flags = tf.app.flags
flags.DEFINE_boolean("feed", False, "feed batches instead of queueing them")
flags.DEFINE_float("input_secs", 0.04, "how long a batch takes, and a step")
flags.DEFINE_integer("steps", 30, "how many")
FLAGS = flags.FLAGS

LENGTH, BATCH, FEATURES, HIDDEN = 4, 8, 6, 5


def batch():
    time.sleep(FLAGS.input_secs)
    return np.random.normal(size=(LENGTH, BATCH, FEATURES)).astype(np.float32)


def pause(loss):
    time.sleep(FLAGS.input_secs)
    return loss


def main(_):
    if FLAGS.feed:
        inputs = tf.placeholder(tf.float32, (LENGTH, BATCH, FEATURES))
    else:
        queue = tf.FIFOQueue(capacity=4, dtypes=tf.float32)
        enqueue = queue.enqueue(tf.py_func(batch, [], tf.float32))
        tf.train.add_queue_runner(tf.train.QueueRunner(queue, [enqueue]))
        inputs = queue.dequeue()
        inputs.set_shape((LENGTH, BATCH, FEATURES))
    labels = tf.cast(tf.reduce_mean(inputs, axis=(0, 2)) > 0, tf.float32)[:, tf.newaxis]
    lengths = tf.Variable([LENGTH] * BATCH, dtype=tf.int32)
    outputs, _ = tf.nn.bidirectional_dynamic_rnn(
        cell_fw=LSTMCell(num_units=HIDDEN),
        cell_bw=LSTMCell(num_units=HIDDEN),
        inputs=inputs,
        sequence_length=lengths,
        dtype=tf.float32,
        time_major=True,
    )
    outputs = tf.reduce_mean(tf.concat(outputs, axis=2), axis=0)
    logits = tf.contrib.layers.fully_connected(inputs=outputs, num_outputs=1, activation_fn=None)
    loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits))
    train = tf.train.AdamOptimizer(0.001).minimize(loss)
    with tf.control_dependencies([train]):
        done = tf.py_func(pause, [loss], tf.float32)

    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        coordinator = tf.train.Coordinator()
        threads = tf.train.start_queue_runners(sess=session, coord=coordinator)
        session.run(done, {inputs: batch()} if FLAGS.feed else None)
        started = time.monotonic()
        for _ in range(FLAGS.steps):
            value = session.run(done, {inputs: batch()} if FLAGS.feed else None)
        print("took %.3f s, loss %f" % (time.monotonic() - started, value))
        coordinator.request_stop()
        coordinator.join(threads)
        print("joined %d threads" % len(threads))


if __name__ == "__main__":
    tf.app.run()
