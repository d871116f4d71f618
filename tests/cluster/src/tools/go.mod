module github.com/ctrlmesh/ctrlmesh/tests/cluster/src/tools

go 1.26
