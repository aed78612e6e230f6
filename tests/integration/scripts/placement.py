"""A cluster of one job, `local`: task 0 puts ops on task 1, which only serves."""

import json
import os
import sys

import tensorflow as tf

job, index, hosts = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
print("TF_CONFIG " + json.dumps(os.environ["TF_CONFIG"]))
server = tf.train.Server(tf.train.ClusterSpec({job: hosts}), job_name=job, task_index=index)
if index > 0:
    server.join()
with tf.device("/job:local/task:1"):
    there = tf.constant(20, name="there") + 1
with tf.device("/job:local/task:0"):
    here = tf.multiply(there, 2, name="here")
with tf.Session(server.target, config=tf.ConfigProto(log_device_placement=True)) as session:
    print("the answer is %d" % session.run(here))
