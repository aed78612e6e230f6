"""Handwritten digits with a script of one's own, as parameter-server training was written for TensorFlow 1.

It knows nothing of airflow-tfps: it gets its place in the cluster by flags, makes its own server, and lets a
`Supervisor` initialise, save and restore. Started by hand, one process per line:

    dist_digits.py --job_name=ps --task_id=0 --ps_hosts=a:2222 --worker_hosts=a:2223,b:2223
    dist_digits.py --job_name=worker --task_id=0 …
    dist_digits.py --job_name=worker --task_id=1 …

The job file `own_script.yaml` says the same once, for all of them; `compat: tf1` there lets `import tensorflow` mean
TensorFlow 1.
"""

from __future__ import annotations

import json
import time
from typing import Any

import digits_network
import tensorflow as tf
from tensorflow.examples.tutorials.mnist import input_data

flags = tf.app.flags
flags.DEFINE_string("job_name", "worker", "ps or worker")
flags.DEFINE_integer("task_id", 0, "index of this task; worker 0 is the chief")
flags.DEFINE_string("ps_hosts", "localhost:2222", "host:port of all parameter servers, with commas")
flags.DEFINE_string("worker_hosts", "localhost:2223", "host:port of all workers, with commas")
flags.DEFINE_integer("issync", 0, "1: a step averages the gradients of all workers")
flags.DEFINE_string("data_dir", "data", "where the images are, see read_data_sets")
flags.DEFINE_string("train_dir", "train", "where the chief saves")
flags.DEFINE_integer("training_steps", 1000, "global step at which training ends")
flags.DEFINE_integer("save_secs", 60, "seconds between checkpoints, and between summaries")
flags.DEFINE_integer("log_steps", 100, "local steps between two lines of progress")
FLAGS = flags.FLAGS

CLASSES = 10
BATCH_SIZE = 100
LEARNING_RATE, DECAY_RATE = 0.3, 0.99
REGULARIZATION_RATE = 0.0001
MOVING_AVERAGE_DECAY = 0.99


def build(images: Any, labels: Any, examples: int, workers: int, *, is_chief: bool) -> dict[str, Any]:
    """The training graph of one worker."""
    global_step = tf.train.get_or_create_global_step()
    regularizer = tf.contrib.layers.l2_regularizer(REGULARIZATION_RATE)
    logits = digits_network.inference(images, CLASSES, regularizer)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=tf.argmax(labels, 1))
    loss = tf.reduce_mean(entropy) + tf.add_n(tf.get_collection("penalties"))
    rate = tf.train.exponential_decay(LEARNING_RATE, global_step, examples // BATCH_SIZE, DECAY_RATE)
    optimizer = tf.train.GradientDescentOptimizer(rate)
    if FLAGS.issync:
        optimizer = tf.train.SyncReplicasOptimizer(
            optimizer, replicas_to_aggregate=workers, total_num_replicas=workers
        )
    train = optimizer.minimize(loss, global_step=global_step)
    if is_chief:  # the averages are kept once, by the chief
        averages = tf.train.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, global_step)
        with tf.control_dependencies([train]):
            train = averages.apply(tf.trainable_variables())
    right = tf.equal(tf.argmax(logits, 1), tf.argmax(labels, 1))
    tf.summary.scalar("loss", loss)
    return {
        "step": global_step,
        "loss": loss,
        "train": train,
        "accuracy": tf.reduce_mean(tf.cast(right, tf.float32)),
        "optimizer": optimizer,
    }


def train(server: Any, cluster: Any, workers: int) -> None:
    """Be a worker until the global step is reached."""
    is_chief = FLAGS.task_id == 0
    digits = input_data.read_data_sets(FLAGS.data_dir, one_hot=True)
    device = f"/job:worker/task:{FLAGS.task_id}"
    with tf.device(tf.train.replica_device_setter(worker_device=device, cluster=cluster)):
        images = tf.placeholder(tf.float32, [None, digits.train.images.shape[1]], name="images")
        labels = tf.placeholder(tf.float32, [None, CLASSES], name="labels")
        model = build(images, labels, digits.train.num_examples, workers, is_chief=is_chief)
        queue = tokens = None
        if FLAGS.issync and is_chief:  # before the Supervisor: it makes variables and ops
            queue = model["optimizer"].get_chief_queue_runner()
            tokens = model["optimizer"].get_init_tokens_op()
        supervisor = tf.train.Supervisor(
            is_chief=is_chief,
            logdir=FLAGS.train_dir,
            init_op=tf.global_variables_initializer(),
            summary_op=None,
            saver=tf.train.Saver(),
            global_step=model["step"],
            save_model_secs=FLAGS.save_secs,
            save_summaries_secs=FLAGS.save_secs,
        )
    session = supervisor.prepare_or_wait_for_session(
        server.target, config=tf.ConfigProto(allow_soft_placement=True)
    )
    if queue is not None:
        supervisor.start_queue_runners(session, [queue])
        session.run(tokens)

    started, local_step, step = time.time(), 0, 0
    while not supervisor.should_stop() and step < FLAGS.training_steps:
        x, y = digits.train.next_batch(BATCH_SIZE)
        _, loss, step = session.run(
            [model["train"], model["loss"], model["step"]], feed_dict={images: x, labels: y}
        )
        local_step += 1
        if local_step % FLAGS.log_steps == 0:
            secs = (time.time() - started) / local_step
            print(  # noqa: T201  the job's `progress` reads it
                f"After {local_step} training steps ({step} global steps), "
                f"loss on training batch is {loss:g}.  ({secs:.3f} sec/batch)"
            )
    if is_chief:
        finish(supervisor, session, model, {images: digits.test.images, labels: digits.test.labels})
    supervisor.stop()


def finish(supervisor: Any, session: Any, model: dict[str, Any], test: dict[Any, Any]) -> None:
    """Save, test, and leave the result where `train` in the DAG finds it."""
    prefix = supervisor.saver.save(session, supervisor.save_path, global_step=model["step"])
    accuracy, step = session.run([model["accuracy"], model["step"]], feed_dict=test)
    print(f"global step {step}: accuracy {accuracy:.3f} on unseen images")  # noqa: T201
    with open("result.json", "w", encoding="utf-8") as file:
        json.dump(
            {"global_step": int(step), "checkpoint": prefix, "metrics": {"accuracy": float(accuracy)}}, file
        )


def main(_: list[str]) -> None:
    hosts = {"ps": FLAGS.ps_hosts.split(","), "worker": FLAGS.worker_hosts.split(",")}
    cluster = tf.train.ClusterSpec(hosts)
    server = tf.train.Server(cluster, job_name=FLAGS.job_name, task_index=FLAGS.task_id)
    if FLAGS.job_name == "ps":
        server.join()  # for ever: whoever started it ends it
    else:
        train(server, cluster, len(hosts["worker"]))


if __name__ == "__main__":
    tf.app.run(main)
