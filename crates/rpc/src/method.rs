//! Table of methods.

use serde_json::Value;

use crate::arguments::Arguments;
use crate::deferred_reply::DeferredReplySlot;
use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::event::EventKind;
use crate::param_type::ParamType;
use crate::passed_fd::PassedFd;
use crate::process_parts::ProcessParts;
use crate::result_type::ResultType;
use crate::spelling_suggestion::nearest_name;

/// Definition of a method.
#[derive(Clone, Copy, Debug)]
pub struct Method {
    /// Whether it reads, changes or subscribes.
    pub verb: MethodKind,
    /// Name after the verb. Methods of different kinds may share a name.
    pub name: &'static str,
    /// Parameters, in the order of the documentation.
    pub parameters: &'static [Parameter],
    /// Type of the result.
    pub answer: ResultType,
    /// Description, as an imperative sentence without a period.
    pub help: &'static str,
    /// Working command line, starting with the program's name.
    pub example: &'static str,
    /// Implementation. It must not block, since all other clients wait for it; a method that takes
    /// a while returns a [`DeferredReplySlot`].
    pub run: fn(&CallContext<'_>) -> Result<Value, RpcError>,
}

/// Effect of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MethodKind {
    /// Reads and changes nothing.
    Get,
    /// Changes something and returns the new state.
    Set,
    /// Creates an object, named by the required parameters of the delete method of the same name.
    Create,
    /// Deletes an object, which its required parameters name.
    Delete,
    /// Subscribes: its result is followed by events.
    Subscribe,
}

/// Parameter of a method.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Name.
    pub name: &'static str,
    /// Allowed values.
    pub kind: ParamType,
    /// Whether it is required, and its default.
    pub need: ParamDefault,
    /// Description, as a phrase.
    pub help: &'static str,
}

/// Whether a parameter is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamDefault {
    /// Required.
    Required,
    /// Optional, without a default.
    Optional,
    /// Optional, with this default in command-line syntax.
    Default(&'static str),
}

/// Context of a method call.
#[derive(Clone, Copy, Debug)]
pub struct CallContext<'a> {
    /// Table of the method.
    pub table: &'a MethodRegistry,
    /// State of the process.
    pub state: &'a ProcessParts,
    /// Validated arguments.
    pub arguments: &'a Arguments,
    /// Slot for a deferred response.
    pub later: &'a DeferredReplySlot,
    /// File descriptor attached to the request, if any.
    pub passed: &'a PassedFd,
}

/// All methods and event kinds, in groups.
#[derive(Clone, Copy, Debug)]
pub struct MethodRegistry {
    methods: &'static [&'static [Method]],
    events: &'static [&'static [EventKind]],
}

impl MethodKind {
    /// Verb on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Set => "set",
            Self::Create => "create",
            Self::Delete => "delete",
            Self::Subscribe => "events",
        }
    }

    /// Whether a method of this kind changes something.
    pub const fn is_change(self) -> bool {
        match self {
            Self::Get | Self::Subscribe => false,
            Self::Set | Self::Create | Self::Delete => true,
        }
    }
}

impl Method {
    /// Name in a request: that of the row, with `set_`, `create_` or `delete_` prepended for a
    /// method that changes something.
    pub fn request_name(&self) -> String {
        match self.verb {
            MethodKind::Get | MethodKind::Subscribe => self.name.to_owned(),
            verb => format!("{}_{}", verb.name(), self.name),
        }
    }

    /// Name on a command line.
    pub fn command_line_name(&self) -> String {
        match self.verb {
            MethodKind::Subscribe => self.name.to_owned(),
            MethodKind::Create | MethodKind::Delete => {
                format!("{} {}", self.name, self.verb.name())
            }
            MethodKind::Get | MethodKind::Set => format!("{} {}", self.verb.name(), self.name),
        }
    }

    /// Parameter of this name, or an error that lists the known ones.
    pub fn parameter(&self, name: &str) -> Result<&'static Parameter, RpcError> {
        let names = || self.parameters.iter().map(|parameter| parameter.name);
        let renamed = RENAMED_PARAMETERS.iter().find(|(old, _)| *old == name);
        if let Some((_, new)) = renamed.filter(|(_, new)| names().any(|name| name == *new)) {
            let (method, old) = (self.command_line_name(), quote_untrusted(name));
            let text = format!("{method}: no parameter {old}: it is now {}", quote_untrusted(new));
            return Err(RpcError::usage(ErrorCode::NoSuchParameter, text));
        }
        if let Some(found) = self.parameters.iter().find(|parameter| parameter.name == name) {
            return Ok(found);
        }
        let expected = join_alternatives(&names().collect::<Vec<_>>());
        let name_shown = quote_untrusted(name);
        let message =
            format!("{}: no parameter {name_shown}, expected {expected}", self.command_line_name());
        let refusal = RpcError::usage(ErrorCode::NoSuchParameter, message);
        Err(match nearest_name(name, names()) {
            Some(near) => refusal.with_hint(format!("did you mean `{near}`?")),
            None => refusal,
        })
    }
}

impl MethodRegistry {
    /// Creates a table of these rows.
    pub const fn new(
        methods: &'static [&'static [Method]],
        events: &'static [&'static [EventKind]],
    ) -> Self {
        Self { methods, events }
    }

    /// All methods.
    pub fn methods(&self) -> impl Iterator<Item = &'static Method> + Clone + use<> {
        self.methods.iter().flat_map(|group| group.iter())
    }

    /// All event kinds.
    pub fn events(&self) -> impl Iterator<Item = &'static EventKind> + use<> {
        self.events.iter().flat_map(|group| group.iter())
    }

    /// Finds a method by its name in a request.
    pub fn find(&self, wire_name: &str) -> Result<&'static Method, RpcError> {
        let found = self.methods().find(|method| method.request_name() == wire_name);
        found.ok_or_else(|| {
            let names: Vec<String> = self.methods().map(Method::request_name).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            unknown_name_error("method", wire_name, &names)
        })
    }

    /// Finds a method by its name on a command line.
    pub fn find_by_command_line_name(
        &self,
        verb: MethodKind,
        name: &str,
    ) -> Result<&'static Method, RpcError> {
        let of_verb = || self.methods().filter(|method| method.verb == verb);
        let found = of_verb().find(|method| method.name == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = of_verb().map(|method| method.name).collect();
            unknown_name_error(&format!("{} method", verb.name()), name, &names)
        })
    }
}

/// Methods of earlier versions under their new names.
const RENAMED: [(&str, &str); 10] = [
    ("allowed_hosts", "hosts"),
    ("queues", "nvme_connections"),
    ("stores", "pools"),
    ("sample", "snapshot_stats"),
    ("store_grow", "pool_grow"),
    ("store_device", "pool_device"),
    ("store_thresholds", "pool_thresholds"),
    ("store_scrub", "pool_scrub"),
    ("store_check", "pool_check"),
    ("volume_revert", "volume_rollback"),
];

/// Parameters of version 0.1 under their new names.
const RENAMED_PARAMETERS: [(&str, &str); 1] = [("unit_bytes", "cluster_bytes")];

/// The present name of a method of version 0.1, with the prefix of `found`.
fn current_name_of_renamed(found: &str, names: &[&str]) -> Option<String> {
    let (prefix, bare) = match found.strip_prefix("set_") {
        Some(bare) => ("set_", bare),
        None => ("", found),
    };
    let (_, new) = RENAMED.iter().find(|(old, _)| *old == bare)?;
    let whole = format!("{prefix}{new}");
    names.contains(&&*whole).then_some(whole)
}

fn unknown_name_error(what: &str, found: &str, names: &[&str]) -> RpcError {
    if let Some(new) = current_name_of_renamed(found, names) {
        let text =
            format!("no {what} {}: it is now {}", quote_untrusted(found), quote_untrusted(&new));
        return RpcError::usage(ErrorCode::NoSuchMethod, text);
    }
    let shown = quote_untrusted(found);
    let expected = join_alternatives(names);
    let refusal =
        RpcError::usage(ErrorCode::NoSuchMethod, format!("no {what} {shown}, expected {expected}"));
    match nearest_name(found, names.iter().copied()) {
        Some(near) => refusal.with_hint(format!("did you mean `{near}`?")),
        None => refusal,
    }
}

#[cfg(test)]
mod tests {
    use super::{RENAMED, current_name_of_renamed};

    #[test]
    fn renamed_method_is_suggested_with_its_prefix_only_where_it_exists() {
        let names = ["nvme_connections", "set_pool_scrub"];
        assert_eq!(current_name_of_renamed("queues", &names).as_deref(), Some("nvme_connections"));
        assert_eq!(
            current_name_of_renamed("set_store_scrub", &names).as_deref(),
            Some("set_pool_scrub")
        );
        assert_eq!(current_name_of_renamed("store_scrub", &names), None);
        assert!(RENAMED.iter().all(|(old, new)| old != new));
    }
}
