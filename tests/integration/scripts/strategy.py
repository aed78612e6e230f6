"""TensorFlow 2: a ParameterServerStrategy whose chief schedules steps on the workers; the cluster is in TF_CONFIG."""

import tensorflow as tf

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight, bias = tf.Variable(0.0), tf.Variable(0.0)
    step = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


@tf.function
def train(batches):
    x, y = next(batches)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x * weight + bias - y))
    for variable, gradient in zip((weight, bias), tape.gradient(loss, (weight, bias))):
        variable.assign_sub(0.1 * gradient)
    step.assign_add(1)
    return loss


@tf.function
def dataset():
    x = tf.data.Dataset.random(seed=1).map(lambda n: tf.cast(n % 1000, tf.float32) / 500 - 1)
    return x.map(lambda a: (a, 2 * a + 10)).batch(16)


batches = iter(coordinator.create_per_worker_dataset(dataset))
for _ in range(4):
    for _ in range(100):
        loss = coordinator.schedule(train, args=(batches,))
    coordinator.join()
    print("step %d loss %f" % (step.numpy(), loss.fetch()), flush=True)
print("weight: %f, bias: %f, on %s" % (weight.numpy(), bias.numpy(), weight.device))
