//! The table for people: `docs/control.md`, as Markdown.

use std::fmt::Write as _;

use crate::method::{Method, Need, Table, Verb};
use crate::refusal::Code;
use crate::shape::Field;

/// What stands before the methods.
const HEAD: &str = include_str!("document/head.md");

/// The documentation of a table. A test holds `docs/control.md` equal to it.
pub fn document(table: &Table) -> String {
    let mut text = HEAD.to_owned();
    text += "\n## Methods\n\n| command | method | what it does |\n|---|---|---|\n";
    for method in table.methods() {
        let (typed, wire, help) = (method.typed_name(), method.wire_name(), method.help);
        let _ = writeln!(text, "| `tenmil {typed}` | `{wire}` | {help} |");
    }
    for method in table.methods() {
        describe(method, &mut text);
    }
    text += "\n## Events\n\n";
    text += "| kind | when it comes |\n|---|---|\n";
    for kind in table.events() {
        let _ = writeln!(text, "| `{}` | {} |", kind.name, kind.help);
    }
    text += "\n## Errors\n\n| code | meaning |\n|---|---|\n";
    for (_, name, meaning) in Code::ALL {
        let _ = writeln!(text, "| `{name}` | {meaning} |");
    }
    text
}

fn describe(method: &Method, text: &mut String) {
    let Method { help, example, .. } = method;
    let _ = writeln!(text, "\n### {}\n\n{help}.\n\n    {example}", method.typed_name());
    if !method.parameters.is_empty() {
        *text += "\n| parameter | values | if not given | what it does |\n|---|---|---|---|\n";
    }
    for parameter in method.parameters {
        let without = match parameter.need {
            Need::Required => "refused".into(),
            Need::Optional if method.verb == Verb::Set => "stays as it is".into(),
            Need::Optional => "all".into(),
            Need::Default(value) => format!("`{value}`"),
        };
        let (name, values, help) = (parameter.name, parameter.kind.expected(), parameter.help);
        let _ = writeln!(text, "| `{name}` | {values} | {without} | {help} |");
    }
    let fields = method.answer.fields();
    if fields.is_empty() {
        let _ = writeln!(text, "\nAnswers {} that describes itself.", method.answer.article());
        return;
    }
    let _ = writeln!(
        text,
        "\nAnswers {}:\n\n| member | type | what it says |",
        method.answer.article()
    );
    *text += "|---|---|---|\n";
    members(fields, "", text);
}

fn members(fields: &[Field], prefix: &str, text: &mut String) {
    for field in fields {
        let (name, shape, help) = (field.name, field.shape.name(), field.help);
        let _ = writeln!(text, "| `{prefix}{name}` | {shape} | {help} |");
        members(field.shape.fields(), &format!("{prefix}{name}."), text);
    }
}
