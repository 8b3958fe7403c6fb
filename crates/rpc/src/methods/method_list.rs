//! Methods about the method table itself.

use serde_json::{Value, json};

use crate::error::RpcError;
use crate::json_schema::table_schema;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "methods",
        parameters: &[],
        answer: ResultType::Rows(&[
            FieldSchema::new("verb", ResultType::Text, "verb on the command line"),
            FieldSchema::new("name", ResultType::Text, "name on the command line"),
            FieldSchema::new("method", ResultType::Text, "name in a request"),
            FieldSchema::new("help", ResultType::Text, "description"),
        ]),
        help: "List the methods",
        example: "tenmil get methods",
        run: methods_method,
    },
    Method {
        verb: MethodKind::Get,
        name: "schema",
        parameters: &[],
        answer: ResultType::Object,
        help: "Show the JSON schema of every method",
        example: "tenmil get schema --json",
        run: |call| Ok(table_schema(call.table)),
    },
    Method {
        verb: MethodKind::Subscribe,
        name: "events",
        parameters: &[Parameter {
            name: "kind",
            kind: ParamType::Texts { len_max: 64, count_max: 64 },
            need: ParamDefault::Optional,
            help: "kinds of events",
        }],
        answer: ResultType::Record(&[FieldSchema::new(
            "kinds",
            ResultType::Texts,
            "kinds of events that may follow",
        )]),
        help: "Subscribe to events",
        example: "tenmil events",
        run: events_method,
    },
];

fn methods_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let row = |method: &Method| {
        json!({
            "verb": method.verb.name(),
            "name": method.name,
            "method": method.request_name(),
            "help": method.help,
        })
    };
    Ok(call.table.methods().map(row).collect())
}

fn events_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let kinds: Vec<&str> = call.table.events().map(|kind| kind.name).collect();
    Ok(json!({ "kinds": kinds }))
}
