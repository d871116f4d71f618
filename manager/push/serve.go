package push

import (
	"context"
	"crypto/tls"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	meshv1 "github.com/ctrlmesh/ctrlmesh/api/mesh/v1"
)

// maxMessage bounds a message from an agent: a report on every pod that a node
// can hold, many times over.
const maxMessage = 4 << 20

// Serve serves agents on a listener until the context ends.
func (s *Server) Serve(ctx context.Context, l net.Listener, config *tls.Config) error {
	config = config.Clone()
	config.MinVersion = tls.VersionTLS13
	config.NextProtos = []string{"h2"}
	server := grpc.NewServer(
		grpc.Creds(newGuardedTLS(config)),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxConcurrentStreams(8),
		grpc.ConnectionTimeout(helloTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: maxIdle, Time: 20 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)
	meshv1.RegisterMeshServer(server, s)
	stop := context.AfterFunc(ctx, func() {
		s.CloseStreams()
		server.Stop()
	})
	defer stop()
	err := server.Serve(guard(l))
	if ctx.Err() != nil {
		return nil
	}
	return err
}
