// Ollama's templates, executed as Ollama does it (template/template.go of ollama/ollama): cases as JSON on stdin, texts as JSON on stdout.
//
//	go run tests/golden/ollama/main.go < cases.json
//
// A case: {"template", "messages": [{"role", "content", "tool_calls": [{"function": {"name", "arguments"}}]}], "tools", "prompt", "suffix"}.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"text/template"
)

// Arguments and Function print themselves as JSON, as Ollama's types do.
type Arguments map[string]any

func (a Arguments) String() string { return marshalled(a) }

type Function struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	Parameters  struct {
		Type       string         `json:"type"`
		Required   []string       `json:"required"`
		Properties map[string]any `json:"properties"`
	} `json:"parameters"`
}

func (f Function) String() string { return marshalled(f) }

type Call struct {
	Function struct {
		Name      string    `json:"name"`
		Arguments Arguments `json:"arguments"`
	} `json:"function"`
}

type Message struct {
	Role      string `json:"role"`
	Content   string `json:"content"`
	ToolCalls []Call `json:"tool_calls"`
}

type Tool struct {
	Type     string   `json:"type"`
	Function Function `json:"function"`
}

type Case struct {
	Template string    `json:"template"`
	Messages []Message `json:"messages"`
	Tools    []Tool    `json:"tools"`
	Prompt   string    `json:"prompt"`
	Suffix   string    `json:"suffix"`
}

func marshalled(value any) string {
	text, err := json.Marshal(value)
	check(err)
	return string(text)
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (c Case) text() string {
	parsed, err := template.New("").Option("missingkey=zero").Parse(c.Template)
	check(err)
	var systems []string
	var messages []*Message
	for number := range c.Messages {
		if c.Messages[number].Role == "system" {
			systems = append(systems, c.Messages[number].Content)
		}
		messages = append(messages, &c.Messages[number])
	}
	values := map[string]any{"System": strings.Join(systems, "\n\n"), "Messages": messages, "Tools": c.Tools, "Response": ""}
	if c.Suffix != "" {
		values = map[string]any{"Prompt": c.Prompt, "Suffix": c.Suffix, "Response": ""}
	}
	var made strings.Builder
	check(parsed.Execute(&made, values))
	return made.String()
}

func main() {
	var cases []Case
	check(json.NewDecoder(os.Stdin).Decode(&cases))
	texts := []string{}
	for _, one := range cases {
		texts = append(texts, one.text())
	}
	check(json.NewEncoder(os.Stdout).Encode(texts))
}
