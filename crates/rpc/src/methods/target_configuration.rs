//! Configuration of an NVMe/TCP target: its hosts with the names of their keys, and reload.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde_json::{Value, json};
use tenmil_base::Error;

use crate::deferred_reply::ReplySender;
use crate::error::{ErrorCode, RpcError};
use crate::event::EventSender;
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};
use crate::target_config::{HostsConfig, KeyReference, SecurityConfig, TargetConfig};

/// Configuration of a target for RPC clients. A handle, cheap to clone: the target publishes its
/// configuration and takes the requests to reload it.
#[derive(Clone, Debug, Default)]
pub struct TargetConfiguration(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<ConfigurationState>,
    announcer: OnceLock<EventSender>,
}

#[derive(Debug, Default)]
struct ConfigurationState {
    /// Rows of `allowed_hosts`.
    hosts: Vec<Value>,
    requests: Vec<ReloadRequest>,
    /// Whether there is a file to reload.
    has_file: bool,
}

/// Request of a client to apply the configuration file again.
#[derive(Debug)]
pub struct ReloadRequest(ReplySender);

/// Unanswered requests. The target answers all of them with one reload.
const REQUESTS_MAX: usize = 64;

const HOST: &[FieldSchema] = &[
    FieldSchema::new(
        "subsystem",
        ResultType::Maybe(&ResultType::Text),
        "NQN of the subsystem; null for the discovery service",
    ),
    FieldSchema::new(
        "host",
        ResultType::Maybe(&ResultType::Text),
        "NQN of the host; null for every host that has no row of its own",
    ),
    FieldSchema::new(
        "authentication",
        ResultType::Flag,
        "whether the host must authenticate with DH-HMAC-CHAP",
    ),
    FieldSchema::new("secure_channel", ResultType::Flag, "whether its connections need TLS"),
    FieldSchema::new("dhchap", ResultType::Texts, "names of the DH-HMAC-CHAP secrets of the host"),
    FieldSchema::new(
        "dhchap_controller",
        ResultType::Maybe(&ResultType::Text),
        "name of the DH-HMAC-CHAP secret of the controller",
    ),
    FieldSchema::new("psk", ResultType::Texts, "names of the TLS PSKs of the host"),
];

const RELOADED: &[FieldSchema] = &[
    FieldSchema::new("path", ResultType::Text, "path of the configuration file"),
    FieldSchema::new("changes", ResultType::Texts, "changes that were made"),
];

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "allowed_hosts",
        parameters: &[],
        answer: ResultType::Rows(HOST),
        help: "List the hosts that may connect over NVMe/TCP, and the names of their keys",
        example: "tenmil get allowed_hosts",
        run: |call| {
            let configuration = configuration_of(call)?;
            Ok(configuration.lock().hosts.clone().into())
        },
    },
    Method {
        verb: MethodKind::Set,
        name: "configuration",
        parameters: &[Parameter {
            name: "reload",
            kind: ParamType::Flag,
            need: ParamDefault::Required,
            help: "true to apply the file again, with the keys that the keyring has now",
        }],
        answer: ResultType::Record(RELOADED),
        help: "Apply the configuration file of an NVMe/TCP target again, as SIGHUP does",
        example: "tenmil set configuration reload=true",
        run: reload_method,
    },
];

fn configuration_of<'a>(call: &CallContext<'a>) -> Result<&'a TargetConfiguration, RpcError> {
    call.state.find_part::<TargetConfiguration>("NVMe/TCP target")
}

fn reload_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let configuration = configuration_of(call)?;
    let refuse = |text: &str| Err(RpcError::usage(ErrorCode::NotFound, text.to_owned()));
    if call.arguments.boolean("reload") != Some(true) {
        return refuse(
            "set configuration: `reload` is false, expected true: nothing else can be set",
        );
    }
    let Some(announcer) = configuration.0.announcer.get() else {
        return refuse("set configuration: the target is starting, expected a running one");
    };
    let mut state = configuration.lock();
    if !state.has_file {
        return refuse(
            "this target has no configuration file, expected `tenmil serve --config FILE`",
        );
    }
    if state.requests.len() >= REQUESTS_MAX {
        let text = format!("{REQUESTS_MAX} requests to reload wait, expected fewer");
        return Err(RpcError::remote(ErrorCode::Failed, text));
    }
    let (promise, pending) = ReplySender::new(announcer.clone());
    state.requests.push(ReloadRequest(promise));
    call.later.defer(pending);
    Ok(Value::Null)
}

impl TargetConfiguration {
    /// Sets the event sender of the control socket, with which responses wake it.
    pub fn set_event_sender(&self, announcer: EventSender) {
        let _ = self.0.announcer.set(announcer);
    }

    /// Publishes a configuration that was applied. `has_file` tells whether it can be reloaded.
    pub fn publish(&self, config: &TargetConfig, has_file: bool) {
        let mut hosts = security_rows(None, &HostsConfig::Any, &config.discovery);
        for subsystem in &config.subsystems {
            hosts.extend(security_rows(
                Some(&subsystem.nqn),
                &subsystem.hosts,
                &subsystem.security,
            ));
        }
        let mut state = self.lock();
        (state.hosts, state.has_file) = (hosts, has_file);
    }

    /// Takes the requests to reload.
    #[must_use]
    pub fn take_reload_requests(&self) -> Vec<ReloadRequest> {
        std::mem::take(&mut self.lock().requests)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ConfigurationState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReloadRequest {
    /// Answers with the changes or the error.
    pub fn answer(self, path: &str, applied: Result<&[String], &Error>) {
        self.0.send_reply(match applied {
            Ok(changes) => Ok(json!({ "path": path, "changes": changes })),
            Err(refused) => {
                let error = RpcError::usage(ErrorCode::Failed, refused.text.clone());
                Err(match refused.hint() {
                    Some(hint) => error.with_hint(hint.to_owned()),
                    None => error,
                })
            }
        });
    }
}

/// Rows of a subsystem, or of the discovery service: its hosts with their keys, by name.
fn security_rows(
    subsystem: Option<&str>,
    allowed: &HostsConfig,
    security: &SecurityConfig,
) -> Vec<Value> {
    let names = |keys: &[KeyReference]| -> Vec<String> {
        keys.iter().map(|key| key.name.to_string()).collect()
    };
    let row = |host: Option<&str>| {
        let keys = security.hosts.iter().find(|keys| Some(keys.nqn.as_str()) == host);
        let has_secret = keys.is_some_and(|keys| !keys.dhchap.is_empty());
        let controller = keys.and_then(|keys| keys.dhchap_controller.as_ref());
        json!({
            "subsystem": subsystem,
            "host": host,
            "authentication": security.authentication_required || has_secret,
            "secure_channel": security.secure_channel_required,
            "dhchap": keys.map(|keys| names(&keys.dhchap)).unwrap_or_default(),
            "dhchap_controller": controller.map(|key| key.name.to_string()),
            "psk": keys.map(|keys| keys.psk_names().collect::<Vec<_>>()).unwrap_or_default(),
        })
    };
    match allowed {
        HostsConfig::Only(hosts) => hosts.iter().map(|host| row(Some(host))).collect(),
        HostsConfig::Any => {
            let named = security.hosts.iter().map(|keys| row(Some(&keys.nqn)));
            named.chain([row(None)]).collect()
        }
    }
}
