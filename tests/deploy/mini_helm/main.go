// A part of Helm, of Debian's packages only: it renders the templates of a chart with values that are merged already.
// chart_test.py compares it with the real one where that is installed.
//
//	mini_helm CHART RELEASE NAMESPACE VALUES.json
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig"
	"gopkg.in/yaml.v3"
)

type files struct{ folder string }

func (f files) Get(name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(f.folder, name))
	return string(text), err
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "Usage: mini_helm CHART RELEASE NAMESPACE VALUES.json")
		os.Exit(2)
	}
	chart := os.Args[1]
	text, err := os.ReadFile(os.Args[4])
	check(err)
	var values map[string]interface{}
	check(json.Unmarshal(text, &values))

	all := template.New("chart").Option("missingkey=zero")
	functions := sprig.TxtFuncMap()
	for _, name := range []string{"env", "expandenv", "now", "uuidv4", "randAlphaNum", "randAlpha", "genPrivateKey"} {
		delete(functions, name) // what differs from run to run has no place in the chart
	}
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out bytes.Buffer
		err := all.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	functions["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	functions["toYaml"] = func(value interface{}) (string, error) {
		var out bytes.Buffer
		encoder := yaml.NewEncoder(&out)
		encoder.SetIndent(2)
		err := encoder.Encode(value)
		return strings.TrimSuffix(out.String(), "\n"), err
	}
	all.Funcs(functions)
	names, err := filepath.Glob(filepath.Join(chart, "templates", "*"))
	check(err)
	sort.Strings(names)
	for _, name := range names {
		text, err := os.ReadFile(name)
		check(err)
		_, err = all.New(filepath.Base(name)).Parse(string(text))
		check(err)
	}
	data := map[string]interface{}{
		"Values":  values,
		"Release": map[string]interface{}{"Name": os.Args[2], "Namespace": os.Args[3]},
		"Chart":   map[string]interface{}{"Name": filepath.Base(chart)},
		"Files":   files{chart},
	}
	for _, name := range names {
		if strings.HasPrefix(filepath.Base(name), "_") {
			continue
		}
		var out bytes.Buffer
		check(all.ExecuteTemplate(&out, filepath.Base(name), data))
		fmt.Printf("---\n# Source: %s\n%s\n", filepath.Base(name), strings.ReplaceAll(out.String(), "<no value>", ""))
	}
}
