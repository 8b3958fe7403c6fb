//! What there is to ask for, and to follow.

use serde_json::{Value, json};

use crate::method::{Call, Method, Verb};
use crate::refusal::Refusal;
use crate::schema::schema;
use crate::shape::{Field, Shape};

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: Verb::Get,
        name: "methods",
        parameters: &[],
        answer: Shape::Rows(&[
            Field::new("verb", Shape::Text, "how it is asked for on a command line"),
            Field::new("name", Shape::Text, "its name there"),
            Field::new("method", Shape::Text, "its name in a request"),
            Field::new("help", Shape::Text, "what it is for"),
        ]),
        help: "List the methods",
        example: "tenmil get methods",
        run: methods,
    },
    Method {
        verb: Verb::Get,
        name: "schema",
        parameters: &[],
        answer: Shape::Object,
        help: "Describe every method as a JSON schema",
        example: "tenmil get schema --json",
        run: |call| Ok(schema(call.table)),
    },
    Method {
        verb: Verb::Follow,
        name: "events",
        parameters: &[],
        answer: Shape::Record(&[Field::new(
            "kinds",
            Shape::Texts,
            "the kinds of events that may follow",
        )]),
        help: "Tell what happens from now on",
        example: "tenmil events",
        run: events,
    },
];

fn methods(call: &Call<'_>) -> Result<Value, Refusal> {
    let row = |method: &Method| {
        json!({
            "verb": method.verb.name(),
            "name": method.name,
            "method": method.wire_name(),
            "help": method.help,
        })
    };
    Ok(call.table.methods().map(row).collect())
}

fn events(call: &Call<'_>) -> Result<Value, Refusal> {
    let kinds: Vec<&str> = call.table.events().map(|kind| kind.name).collect();
    Ok(json!({ "kinds": kinds }))
}
