"""y = 2x + 10 as it was written for TensorFlow 0.12: flags, Supervisor, a logdir of its own, `--issync`."""

import numpy as np
import tensorflow as tf

flags = tf.app.flags
flags.DEFINE_string("ps_hosts", "", "host:port, with commas")
flags.DEFINE_string("worker_hosts", "", "host:port, with commas")
flags.DEFINE_string("job_name", "", "ps or worker")
flags.DEFINE_integer("task_index", 0, "index in the job")
flags.DEFINE_integer("issync", 0, "1: synchronous")
flags.DEFINE_integer("steps", 1000, "global steps")
flags.DEFINE_float("learning_rate", 0.05, "of gradient descent")
flags.DEFINE_float("save_secs", 60, "between checkpoints")
FLAGS = flags.FLAGS
REPORT_STEPS = 20


def main(_):
    ps_hosts, worker_hosts = FLAGS.ps_hosts.split(","), FLAGS.worker_hosts.split(",")
    cluster = tf.train.ClusterSpec({"ps": ps_hosts, "worker": worker_hosts})
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_index)
    if FLAGS.job_name == "ps":
        server.join()
    is_chief = FLAGS.task_index == 0

    worker = "/job:worker/task:%d" % FLAGS.task_index
    with tf.device(tf.train.replica_device_setter(worker_device=worker, cluster=cluster)):
        global_step = tf.Variable(0, name="global_step", trainable=False)
        x, y = tf.placeholder("float"), tf.placeholder("float")
        weight = tf.get_variable("weight", [1], tf.float32, initializer=tf.random_normal_initializer())
        bias = tf.get_variable("bias", [1], tf.float32, initializer=tf.random_normal_initializer())
        loss = tf.square(y - (tf.multiply(x, weight) + bias))
        optimizer = tf.train.GradientDescentOptimizer(FLAGS.learning_rate)
        gradients = optimizer.compute_gradients(loss)
        if FLAGS.issync == 1:
            optimizer = tf.train.SyncReplicasOptimizer(
                optimizer,
                replicas_to_aggregate=len(worker_hosts),
                replica_id=FLAGS.task_index,
                total_num_replicas=len(worker_hosts),
                use_locking=True,
            )
        train = optimizer.apply_gradients(gradients, global_step=global_step)
        if FLAGS.issync == 1:
            tokens, queue = optimizer.get_init_tokens_op(), optimizer.get_chief_queue_runner()
        init = tf.initialize_all_variables()
        saver = tf.train.Saver()

    supervisor = tf.train.Supervisor(
        is_chief=is_chief,
        logdir="./checkpoint/",
        init_op=init,
        summary_op=None,
        saver=saver,
        global_step=global_step,
        save_model_secs=FLAGS.save_secs,
    )
    with supervisor.prepare_or_wait_for_session(server.target) as session:
        if is_chief and FLAGS.issync == 1:
            supervisor.start_queue_runners(session, [queue])
            session.run(tokens)
        if is_chief:
            print("beginning at global step %d" % session.run(global_step))
        local, step = 0, 0
        while step < FLAGS.steps:
            a = np.random.randn(1)
            b = 2 * a + 10 + np.random.randn(1) * 0.33
            _, value, step = session.run([train, loss, global_step], feed_dict={x: a, y: b})
            local += 1
            if local % REPORT_STEPS == 0:
                now = (step, *(v[0] for v in session.run([weight, bias])), value[0], local)
                print("step: %d, weight: %f, bias: %f, loss: %f, local: %d" % now)
        print("the last step: %d, local: %d" % (step, local))
        if is_chief:
            saver.save(session, supervisor.save_path, global_step=global_step)
    supervisor.stop()
    print("stopped")


if __name__ == "__main__":
    tf.app.run()
