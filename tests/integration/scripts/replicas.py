"""Asynchronous training with a MonitoredTrainingSession; `--device_filters` keeps the workers apart."""

import time

import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "host:port, with commas")
flags.DEFINE_string("worker_hosts", "", "host:port, with commas")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_integer("task_index", 0, "index in the job")
flags.DEFINE_boolean("device_filters", True, "whether a worker sees itself and the ps only")
flags.DEFINE_integer("steps", 200, "global steps")
FLAGS = flags.FLAGS


def main(_):
    cluster = tf.train.ClusterSpec({"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")})
    me = "/job:worker/task:%d" % FLAGS.task_index
    config = tf.ConfigProto()
    if FLAGS.device_filters and FLAGS.job_name == "worker":
        config.device_filters[:] = ["/job:ps", me]
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index, config=config)
    print("serving", flush=True)
    if FLAGS.job_name == "ps":
        server.join()
    with tf.device(tf.train.replica_device_setter(worker_device=me, cluster=cluster)):
        global_step = tf.train.get_or_create_global_step()
        weights = tf.get_variable("weights", [10])
        loss = tf.reduce_sum(tf.square(weights - 1))
        train = tf.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=global_step)
    end = tf.train.FinalOpsHook(global_step)  # what a step fetches may be of before it, or before another's
    hooks = [tf.train.StopAtStepHook(last_step=FLAGS.steps), end]
    local = 0
    with tf.train.MonitoredTrainingSession(
        server.target, is_chief=FLAGS.task_index == 0, hooks=hooks, config=config
    ) as session:
        while not session.should_stop():
            _, step = session.run([train, global_step])
            local += 1
            time.sleep(0.01)
            if local == 1:
                print("the first step: %d" % step, flush=True)
    print("the last step: %d, local: %d" % (end.final_ops_values, local))


if __name__ == "__main__":
    tf.app.run()
