"""An operator as people write them with the official Python client, kubernetes.

It elects a leader by the client's own leader election, whose lock is a ConfigMap. The leader lists and watches
Copies in all namespaces, and makes a ConfigMap with the data of each.
"""
import logging
import os
import socket
import sys

from kubernetes import client, config, watch
from kubernetes.client.rest import ApiException
from kubernetes.leaderelection import electionconfig, leaderelection
from kubernetes.leaderelection.resourcelock.configmaplock import ConfigMapLock

GROUP, VERSION, PLURAL = "operators.example.com", "v1", "copies"


def reconcile(copy):
    """Writes the ConfigMap of a Copy, and which generation it has."""
    meta = copy["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    if meta.get("deletionTimestamp") or copy.get("status", {}).get("observedGeneration") == meta["generation"]:
        return
    core = client.CoreV1Api()
    owner = client.V1OwnerReference(
        api_version=GROUP + "/" + VERSION, kind=copy["kind"], name=name, uid=meta["uid"], controller=True)
    body = client.V1ConfigMap(
        metadata=client.V1ObjectMeta(name=name, namespace=namespace, owner_references=[owner]), data=copy["spec"]["data"])
    try:
        core.create_namespaced_config_map(namespace, body)
    except ApiException as e:
        if e.status != 409:
            raise
        core.replace_namespaced_config_map(name, namespace, body)
    status = {"status": {"observedGeneration": meta["generation"]}}
    client.CustomObjectsApi().patch_namespaced_custom_object_status(GROUP, VERSION, namespace, PLURAL, name, status)


def lead():
    """Lists and watches until the process ends. A watch that has expired, or was cut off, begins with a list."""
    while True:
        try:
            for event in watch.Watch().stream(
                    client.CustomObjectsApi().list_cluster_custom_object, GROUP, VERSION, PLURAL, timeout_seconds=60):
                if event["type"] in ("ADDED", "MODIFIED"):
                    attempt(event["object"])
        except Exception:  # an operator goes on after any failure
            logging.exception("the watch has ended")


def attempt(copy):
    """Reconciles a Copy. What fails is tried again after the next list."""
    try:
        reconcile(copy)
    except ApiException as e:
        if e.status != 404:
            logging.warning("failed to reconcile %s/%s: %s", copy["metadata"]["namespace"], copy["metadata"]["name"], e.reason)


def main():
    config.load_incluster_config()
    lock = ConfigMapLock("python-client", os.environ["POD_NAMESPACE"], socket.gethostname())
    leaderelection.LeaderElection(electionconfig.Config(
        lock, lease_duration=17, renew_deadline=15, retry_period=2, onstarted_leading=lead,
        onstopped_leading=lambda: os._exit(1))).run()


if __name__ == "__main__":
    sys.exit(main())
