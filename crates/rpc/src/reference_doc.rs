//! Generator of the reference that `tenmil get --markdown` prints.

use std::fmt::Write as _;

use crate::error::ErrorCode;
use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault};
use crate::result_type::FieldSchema;

/// Text in front of the method descriptions.
const HEAD: &str = include_str!("document/head.md");

/// Reference of all methods, events and errors of a table as Markdown.
pub fn reference_markdown(table: &MethodRegistry) -> String {
    let mut text = HEAD.to_owned();
    text += "\n## Methods\n\n| command | method | description |\n|---|---|---|\n";
    for method in table.methods() {
        let (typed, wire, help) = (method.command_line_name(), method.request_name(), method.help);
        let _ = writeln!(text, "| `tenmil {typed}` | `{wire}` | {help} |");
    }
    for method in table.methods() {
        describe_method(method, &mut text);
    }
    text += "\n## Events\n\n";
    text += "| kind | emitted when |\n|---|---|\n";
    for kind in table.events() {
        let _ = writeln!(text, "| `{}` | {} |", kind.name, kind.help);
    }
    text += "\n## Errors\n\n| code | status | meaning |\n|---|---|---|\n";
    for (_, name, status, meaning) in ErrorCode::ALL {
        let _ = writeln!(text, "| `{name}` | {status} | {meaning} |");
    }
    text
}

fn describe_method(method: &Method, text: &mut String) {
    let Method { help, example, .. } = method;
    let _ = writeln!(text, "\n### {}\n\n{help}.\n\n    {example}", method.command_line_name());
    if !method.parameters.is_empty() {
        *text += "\n| parameter | values | default | description |\n|---|---|---|---|\n";
    }
    for parameter in method.parameters {
        let without = match parameter.need {
            ParamDefault::Required => "required".into(),
            ParamDefault::Optional if method.verb == MethodKind::Set => "unchanged".into(),
            ParamDefault::Optional if method.verb.is_change() => "none".into(),
            ParamDefault::Optional => "all".into(),
            ParamDefault::Default(value) => format!("`{value}`"),
        };
        let (name, values, help) = (parameter.name, parameter.kind.expected_text(), parameter.help);
        let _ = writeln!(text, "| `{name}` | {values} | {without} | {help} |");
    }
    let fields = method.answer.declared_fields();
    if fields.is_empty() {
        let _ = writeln!(
            text,
            "\nReturns {} that describes itself.",
            method.answer.name_with_article()
        );
        return;
    }
    let _ = writeln!(
        text,
        "\nReturns {}:\n\n| member | type | description |",
        method.answer.name_with_article()
    );
    *text += "|---|---|---|\n";
    describe_members(fields, "", text);
}

fn describe_members(fields: &[FieldSchema], prefix: &str, text: &mut String) {
    for field in fields {
        let (name, geometry, help) = (field.name, field.geometry.type_name(), field.help);
        let _ = writeln!(text, "| `{prefix}{name}` | {geometry} | {help} |");
        describe_members(field.geometry.declared_fields(), &format!("{prefix}{name}."), text);
    }
}
