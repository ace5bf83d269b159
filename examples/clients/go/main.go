// Command ask prints a served model's answer as it comes: go run . HOST:PORT MODEL TEXT
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	onwardv1 "example.com/onward/gen/onward/v1"
)

func main() {
	target, model, text := os.Args[1], os.Args[2], os.Args[3]
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := onwardv1.NewGenerationServiceClient(connection)
	// Its end, or an early return, gives the request up, and the server frees what it held.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for {
		hasBegun, err := ask(ctx, client, model, text)
		if err == nil {
			return
		}
		delay := retryDelay(err)
		if hasBegun || delay == nil {
			log.Fatal(err)
		}
		select {
		case <-time.After(*delay):
		case <-ctx.Done():
			log.Fatal(err)
		}
	}
}

// ask prints one answer, and tells whether any of it came.
func ask(ctx context.Context, client onwardv1.GenerationServiceClient, model, text string) (bool, error) {
	stream, err := client.GenerateStream(ctx, &onwardv1.GenerateStreamRequest{
		Model:    model,
		Prompt:   &onwardv1.GenerateStreamRequest_Text{Text: text},
		Sampling: &onwardv1.SamplingParams{Temperature: proto.Float64(0)},
		Stopping: &onwardv1.StoppingParams{MaxTokens: proto.Int32(24)},
	})
	if err != nil {
		return false, err
	}
	hasBegun, isComplete := false, false
	for {
		event, err := stream.Recv()
		if errors.Is(err, io.EOF) && isComplete {
			return true, nil
		}
		if err != nil {
			return hasBegun, err
		}
		hasBegun = true
		fmt.Print(event.GetDelta().GetText())
		if summary := event.GetSummary(); summary != nil {
			isComplete = true
			fmt.Printf("\n%d tokens\n", summary.GetUsage().GetGeneratedTokens())
		}
	}
}

// retryDelay is when to come again, if the server has said so.
func retryDelay(err error) *time.Duration {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.RetryInfo); ok {
			delay := info.GetRetryDelay().AsDuration()
			return &delay
		}
	}
	return nil
}
