"""In-graph replication: the chief builds the graph of all workers and feeds them; they and the ps only serve."""

import argparse

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--job_name")
parser.add_argument("--task_index", type=int)
for role in ("ps", "worker", "chief"):
    parser.add_argument(f"--{role}_hosts")
parser.add_argument("--steps", type=int, default=200)
FLAGS = parser.parse_args()

workers = FLAGS.worker_hosts.split(",")
cluster = tf.train.ClusterSpec(
    {"ps": FLAGS.ps_hosts.split(","), "worker": workers, "chief": FLAGS.chief_hosts.split(",")}
)
server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
if FLAGS.job_name != "chief":
    server.join()

with tf.device("/job:ps/task:0"):
    weight = tf.get_variable("weight", [], initializer=tf.zeros_initializer())
    bias = tf.get_variable("bias", [], initializer=tf.zeros_initializer())
    step = tf.train.get_or_create_global_step()
optimizer = tf.train.GradientDescentOptimizer(0.1)
xs, ys, towers = [], [], []
for i in range(len(workers)):
    with tf.device("/job:worker/task:%d" % i), tf.name_scope("tower_%d" % i):
        x, y = tf.placeholder(tf.float32, [None]), tf.placeholder(tf.float32, [None])
        loss = tf.reduce_mean(tf.square(x * weight + bias - y), name="loss")
        towers.append(optimizer.compute_gradients(loss))
        xs.append(x)
        ys.append(y)
with tf.device("/job:ps/task:0"):
    means = [(tf.add_n([g for g, _ in pairs]) / len(pairs), pairs[0][1]) for pairs in zip(*towers)]
    train = optimizer.apply_gradients(means, global_step=step)

with tf.Session(server.target, config=tf.ConfigProto(log_device_placement=True)) as session:
    session.run(tf.global_variables_initializer())
    for _ in range(FLAGS.steps):
        parts = [np.random.randn(32) for _ in workers]
        feed = dict(zip(xs, parts))
        feed.update({y: 2 * part + 10 + np.random.randn(32) * 0.33 for y, part in zip(ys, parts)})
        session.run(train, feed)
    print("step: %d, weight: %f, bias: %f" % tuple(session.run([step, weight, bias])))
