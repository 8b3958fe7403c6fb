//! The table of methods.

use serde_json::Value;

use crate::arguments::Arguments;
use crate::event::EventKind;
use crate::kind::Kind;
use crate::later::Later;
use crate::passed::Passed;
use crate::refusal::{Code, Refusal, either, quoted};
use crate::shape::Shape;
use crate::state::State;
use crate::suggest::nearest;

/// A row of the table: everything there is to know about a method.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// Whether it tells, changes, or goes on telling.
    pub verb: Verb,
    /// Its name behind the verb. What is told and what is changed may have the same name.
    pub name: &'static str,
    /// What can be given to it, in the order in which people want to read it.
    pub parameters: &'static [Parameter],
    /// What it answers.
    pub answer: Shape,
    /// What it is for, as a sentence without its full stop.
    pub help: &'static str,
    /// A command line that does something, the program's name first.
    pub example: &'static str,
    /// What it does. It must not wait: everybody else who asks is waiting for it. What takes a while is
    /// left to a thread of its own, and answered [`Later`].
    pub run: fn(&Call<'_>) -> Result<Value, Refusal>,
}

/// What a method does to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verb {
    /// Tells something and changes nothing.
    Get,
    /// Changes something, and answers how it then is.
    Set,
    /// Tells something from now on: its answer is followed by events.
    Follow,
}

/// Something that can be given to a method.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// What values it may have.
    pub kind: Kind,
    /// Whether it has to be given.
    pub need: Need,
    /// What it does, as half a sentence.
    pub help: &'static str,
}

/// Whether a parameter has to be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// It has to.
    Required,
    /// It need not; then nothing is said about it.
    Optional,
    /// It need not; then it is this, written as on a command line.
    Default(&'static str),
}

/// What a method's function is given.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The table that the method is in.
    pub table: &'a Table,
    /// What there is to answer from.
    pub state: &'a State,
    /// What was given, checked against the method's row.
    pub arguments: &'a Arguments,
    /// Where word is left that the answer comes later.
    pub later: &'a Later,
    /// The descriptor that came beside it, if one has.
    pub passed: &'a Passed,
}

/// All methods and all kinds of events, in groups.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    methods: &'static [&'static [Method]],
    events: &'static [&'static [EventKind]],
}

impl Verb {
    /// The verb of the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Set => "set",
            Self::Follow => "events",
        }
    }
}

impl Method {
    /// Its name in a request: that of its row, with `set_` before it if it changes something.
    pub fn wire_name(&self) -> String {
        match self.verb {
            Verb::Get | Verb::Follow => self.name.to_owned(),
            Verb::Set => format!("set_{}", self.name),
        }
    }

    /// Its name on a command line.
    pub fn typed_name(&self) -> String {
        match self.verb {
            Verb::Follow => self.name.to_owned(),
            verb => format!("{} {}", verb.name(), self.name),
        }
    }

    /// The parameter of this name, or a refusal that says which there are.
    pub fn parameter(&self, name: &str) -> Result<&'static Parameter, Refusal> {
        let names = || self.parameters.iter().map(|parameter| parameter.name);
        if let Some(found) = self.parameters.iter().find(|parameter| parameter.name == name) {
            return Ok(found);
        }
        let expected = either(&names().collect::<Vec<_>>());
        let name_shown = quoted(name);
        let message =
            format!("{}: no parameter {name_shown}, expected {expected}", self.typed_name());
        let refusal = Refusal::caller(Code::NoSuchParameter, message);
        Err(match nearest(name, names()) {
            Some(near) => refusal.with_hint(format!("did you mean `{near}`?")),
            None => refusal,
        })
    }
}

impl Table {
    /// A table of these rows.
    pub const fn new(
        methods: &'static [&'static [Method]],
        events: &'static [&'static [EventKind]],
    ) -> Self {
        Self { methods, events }
    }

    /// Every row.
    pub fn methods(&self) -> impl Iterator<Item = &'static Method> + Clone + use<> {
        self.methods.iter().flat_map(|group| group.iter())
    }

    /// Every kind of event.
    pub fn events(&self) -> impl Iterator<Item = &'static EventKind> + use<> {
        self.events.iter().flat_map(|group| group.iter())
    }

    /// The method that a request names.
    pub fn find(&self, wire_name: &str) -> Result<&'static Method, Refusal> {
        let found = self.methods().find(|method| method.wire_name() == wire_name);
        found.ok_or_else(|| {
            let names: Vec<String> = self.methods().map(Method::wire_name).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            no_such("method", wire_name, &names)
        })
    }

    /// The method that a command line names.
    pub fn find_typed(&self, verb: Verb, name: &str) -> Result<&'static Method, Refusal> {
        let of_verb = || self.methods().filter(|method| method.verb == verb);
        let found = of_verb().find(|method| method.name == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = of_verb().map(|method| method.name).collect();
            no_such(&format!("{} method", verb.name()), name, &names)
        })
    }
}

fn no_such(what: &str, found: &str, names: &[&str]) -> Refusal {
    let shown = quoted(found);
    let expected = either(names);
    let refusal =
        Refusal::caller(Code::NoSuchMethod, format!("no {what} {shown}, expected {expected}"));
    match nearest(found, names.iter().copied()) {
        Some(near) => refusal.with_hint(format!("did you mean `{near}`?")),
        None => refusal,
    }
}
