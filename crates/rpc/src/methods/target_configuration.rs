//! Configuration of a target as a whole: its text, applying another one, and reload.
//!
//! ```text
//!   control thread                         main loop of the target
//!   method ─ ConfigurationRequest ───────▶ edit, check, apply, write the file
//!      deferred reply ◀── answer ─────────┘   └ publish ServedConfiguration, emit events
//! ```

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use serde_json::{Value, json};
use tenmil_base::BlockDevice;

use super::live_configuration::object_row;
use crate::deferred_reply::ReplySender;
use crate::error::{ErrorCode, RpcError};
use crate::event::{Event, EventKind, EventSender};
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};
use crate::target_config::{ConfigEdit, TargetConfig};

/// Configuration of a target for RPC clients. A handle, cheap to clone: the target publishes its
/// configuration and takes the requests to change it.
#[derive(Clone, Debug, Default)]
pub struct TargetConfiguration(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<ConfigurationState>,
    announcer: OnceLock<EventSender>,
}

#[derive(Debug, Default)]
struct ConfigurationState {
    served: Option<Arc<ServedConfiguration>>,
    requests: Vec<ConfigurationRequest>,
}

/// The configuration that is served now, for the methods that list it.
#[derive(Debug)]
pub struct ServedConfiguration {
    /// The configuration.
    pub config: TargetConfig,
    /// Its text, which is that of the file unless the file has been changed since.
    pub text: String,
    /// File that has the configuration; `None` if it is in memory only.
    pub file: Option<PathBuf>,
    /// Bound addresses of the listeners, in their order.
    pub addresses: Vec<SocketAddr>,
    /// Devices of the namespaces.
    pub namespaces: Vec<ServedNamespace>,
}

/// Device of a namespace.
#[derive(Debug)]
pub struct ServedNamespace {
    /// NQN of its subsystem.
    pub nqn: String,
    /// NSID.
    pub nsid: u32,
    /// The device, which the list does not keep open.
    pub device: Weak<dyn BlockDevice>,
}

/// Request of a client to change the configuration.
#[derive(Debug)]
pub struct ConfigurationRequest {
    /// What is requested.
    pub action: ConfigurationAction,
    /// Description of the client.
    pub client: String,
    reply: ReplySender,
}

/// Change of the configuration.
#[derive(Clone, Debug)]
pub enum ConfigurationAction {
    /// Apply the file again.
    Reload,
    /// Edit one object.
    Edit(ConfigEdit),
    /// Apply another text.
    Apply {
        /// Text of a configuration.
        text: String,
        /// Whether only the difference is reported.
        is_dry_run: bool,
    },
}

/// A change that was made.
#[derive(Clone, Debug, Default)]
pub struct ConfigurationChange {
    /// Difference to the former configuration, one line for each object.
    pub difference: Vec<String>,
    /// Changes that were made, one line each.
    pub changes: Vec<String>,
    /// Parts that could not be made so, one line each.
    pub failed: Vec<String>,
    /// File that has it now; `None` if it is in memory only.
    pub saved_to: Option<PathBuf>,
}

/// Requests that may wait.
const REQUESTS_MAX: usize = 64;

/// Longest text of a configuration that a request may have; the body of a request is limited, too.
const TEXT_MAX: usize = 1 << 20;

pub(super) const CHANGES: FieldSchema =
    FieldSchema::new("changes", ResultType::Texts, "changes that were made");
pub(super) const FAILED: FieldSchema =
    FieldSchema::new("failed", ResultType::Texts, "parts that could not be made so");
pub(super) const SAVED_TO: FieldSchema = FieldSchema::new(
    "saved_to",
    ResultType::Maybe(&ResultType::Text),
    "file that has the configuration now; null if it is in memory only",
);

const APPLIED: &[FieldSchema] = &[
    FieldSchema::new(
        "path",
        ResultType::Maybe(&ResultType::Text),
        "path of the configuration file; null if there is none",
    ),
    FieldSchema::new(
        "difference",
        ResultType::Texts,
        "objects that are added (+), removed (-) and changed (~)",
    ),
    CHANGES,
    FAILED,
    SAVED_TO,
];

const CONFIGURATION: &[FieldSchema] = &[
    FieldSchema::new(
        "path",
        ResultType::Maybe(&ResultType::Text),
        "path of the configuration file; null if there is none",
    ),
    FieldSchema::new("text", ResultType::Text, "text of the configuration, as TOML"),
];

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "configuration",
        parameters: &[],
        answer: ResultType::Record(CONFIGURATION),
        help: "Show the configuration that a target serves, as the text of a file",
        example: "tenmil get configuration --json",
        run: |call| {
            let served = served_configuration(call)?;
            let path = served.file.as_ref().map(|path| path.display().to_string());
            Ok(json!({ "path": path, "text": served.text }))
        },
    },
    Method {
        verb: MethodKind::Set,
        name: "configuration",
        parameters: &[
            Parameter {
                name: "reload",
                kind: ParamType::Flag,
                need: ParamDefault::Optional,
                help: "true to apply the file again, with the keys that the keyring has now",
            },
            Parameter {
                name: "text",
                kind: ParamType::Text { len_max: TEXT_MAX },
                need: ParamDefault::Optional,
                help: "text of another configuration to apply, and to write to the file",
            },
            Parameter {
                name: "dry_run",
                kind: ParamType::Flag,
                need: ParamDefault::Optional,
                help: "true to check the text and report its difference, and to change nothing",
            },
        ],
        answer: ResultType::Record(APPLIED),
        help: "Apply the configuration file of a target again, as SIGHUP does, or another text",
        example: "tenmil set configuration reload=true",
        run: set_configuration_method,
    },
];

const CHANGED: EventKind = EventKind {
    name: "configuration-changed",
    help: "a client changed the configuration; with the object before and after",
};
const REJECTED: EventKind = EventKind {
    name: "configuration-change-refused",
    help: "a change of the configuration that a client requested was rejected; nothing was changed",
};

pub(super) const EVENTS: &[EventKind] = &[CHANGED, REJECTED];

fn configuration_of<'a>(call: &CallContext<'a>) -> Result<&'a TargetConfiguration, RpcError> {
    call.state.find_part::<TargetConfiguration>("target that can be configured")
}

/// The configuration that is served now.
pub(super) fn served_configuration(
    call: &CallContext<'_>,
) -> Result<Arc<ServedConfiguration>, RpcError> {
    configuration_of(call)?.served().ok_or_else(starting_error)
}

fn starting_error() -> RpcError {
    RpcError::usage(ErrorCode::NotFound, "the target is starting, expected a running one")
}

fn set_configuration_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let is_reload = call.arguments.boolean("reload") == Some(true);
    let is_dry_run = call.arguments.boolean("dry_run") == Some(true);
    let action = match (is_reload, call.arguments.text("text")) {
        (true, None) if !is_dry_run => ConfigurationAction::Reload,
        (false, Some(text)) => ConfigurationAction::Apply { text: text.to_owned(), is_dry_run },
        _ => {
            let text = "set configuration: expected either reload=true, or a text, which may have \
                        dry_run=true";
            return Err(RpcError::usage(ErrorCode::BadValue, text));
        }
    };
    if is_reload && served_configuration(call)?.file.is_none() {
        let text = "this target has no configuration file, expected `tenmil serve --config FILE`";
        return Err(RpcError::usage(ErrorCode::NotFound, text));
    }
    request_change(call, action)
}

/// Queues a request for the main loop, which answers it.
pub(super) fn request_change(
    call: &CallContext<'_>,
    action: ConfigurationAction,
) -> Result<Value, RpcError> {
    let configuration = configuration_of(call)?;
    let announcer = configuration.0.announcer.get().ok_or_else(starting_error)?;
    let mut state = configuration.lock();
    if state.requests.len() >= REQUESTS_MAX {
        let text =
            format!("{REQUESTS_MAX} requests to change the configuration wait, expected fewer");
        return Err(RpcError::remote(ErrorCode::Failed, text));
    }
    let (reply, pending) = ReplySender::new(announcer.clone());
    let client = match call.later.client() {
        "" => "a client of the control socket",
        client => client,
    };
    state.requests.push(ConfigurationRequest { action, client: client.to_owned(), reply });
    call.later.defer(pending);
    Ok(Value::Null)
}

impl TargetConfiguration {
    /// Sets the event sender of the control socket, with which responses wake it.
    pub fn set_event_sender(&self, announcer: EventSender) {
        let _ = self.0.announcer.set(announcer);
    }

    /// Publishes a configuration that was applied.
    pub fn publish(&self, served: ServedConfiguration) {
        self.lock().served = Some(Arc::new(served));
    }

    /// The configuration that was published last.
    #[must_use]
    pub fn served(&self) -> Option<Arc<ServedConfiguration>> {
        self.lock().served.clone()
    }

    /// Takes the requests of clients.
    #[must_use]
    pub fn take_requests(&self) -> Vec<ConfigurationRequest> {
        std::mem::take(&mut self.lock().requests)
    }

    fn lock(&self) -> MutexGuard<'_, ConfigurationState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConfigurationRequest {
    /// Answers with what was done or with the error, and emits it as an event. `served` is the
    /// configuration before and after.
    pub fn answer(
        self,
        done: Result<&ConfigurationChange, RpcError>,
        served: [Option<&ServedConfiguration>; 2],
        events: Option<&EventSender>,
    ) {
        let Self { action, client, reply } = self;
        let object = |of: Option<&ServedConfiguration>| match &action {
            ConfigurationAction::Edit(edit) => object_row(of?, edit),
            _ => None,
        };
        let [before, after] = served.map(object);
        if let Some(events) = events.filter(|_| action.is_reported()) {
            events.emit(change_event(&action, &client, done.as_ref(), [&before, &after]));
        }
        reply.send_reply(done.map(|change| action.result(change, served[1], after)));
    }
}

impl ConfigurationAction {
    /// What is done, as in `create subsystem`.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Reload => "reload".to_owned(),
            Self::Edit(edit) => edit.action(),
            Self::Apply { .. } => "apply".to_owned(),
        }
    }

    /// Whether it is an event of its own; a reload has one as SIGHUP has.
    const fn is_reported(&self) -> bool {
        match self {
            Self::Reload | Self::Apply { is_dry_run: true, .. } => false,
            Self::Edit(_) | Self::Apply { .. } => true,
        }
    }

    fn result(
        &self,
        change: &ConfigurationChange,
        served: Option<&ServedConfiguration>,
        object: Option<Value>,
    ) -> Value {
        let ConfigurationChange { difference, changes, failed, saved_to } = change;
        let saved_to = saved_to.as_ref().map(|path| path.display().to_string());
        let mut result = json!({ "changes": changes, "failed": failed, "saved_to": saved_to });
        match self {
            Self::Edit(edit) if edit.kind == MethodKind::Delete => {}
            Self::Edit(_) => result["object"] = object.into(),
            Self::Reload | Self::Apply { .. } => {
                let file = served.and_then(|served| served.file.as_ref());
                result["path"] = file.map(|path| path.display().to_string()).into();
                result["difference"] = difference.as_slice().into();
            }
        }
        result
    }
}

fn change_event(
    action: &ConfigurationAction,
    client: &str,
    done: Result<&&ConfigurationChange, &RpcError>,
    [before, after]: [&Option<Value>; 2],
) -> Event {
    let name = action.name();
    let mut about = json!({ "client": client, "action": name });
    match done {
        Ok(change) => {
            about["difference"] = change.difference.as_slice().into();
            about["before"] = before.clone().into();
            about["after"] = after.clone().into();
            about["saved_to"] =
                change.saved_to.as_ref().map(|path| path.display().to_string()).into();
            about["failed"] = change.failed.as_slice().into();
            let what = match change.difference.is_empty() {
                true => "nothing has changed".to_owned(),
                false => change.difference.join("; "),
            };
            Event { kind: CHANGED, text: format!("{client}: {name}: {what}"), about }
        }
        Err(refused) => {
            about["error"] = refused.message.as_str().into();
            let text = format!("{client}: nothing is changed: {}", refused.message);
            Event { kind: REJECTED, text, about }
        }
    }
}
