#!/bin/sh
# Started by the container of infra/Dockerfile.mlflow with DATABASE_HOST, DATABASE_PASSWORD and
# MLFLOW_ARTIFACTS_DESTINATION. The password goes by the environment: arguments are seen by everyone on the machine.
set -eu
export MLFLOW_BACKEND_STORE_URI="postgresql://mlflow:${DATABASE_PASSWORD}@${DATABASE_HOST}:5432/mlflow?sslmode=require"
unset DATABASE_PASSWORD
exec mlflow server --host 0.0.0.0 --port 5000 --workers "${MLFLOW_WORKERS:-2}" \
    --artifacts-destination "${MLFLOW_ARTIFACTS_DESTINATION}"
