//! Control interface: a table of methods, and the HTTP API that serves it.
//!
//! A running process is queried and changed with methods. Each is one row of a [`MethodRegistry`]:
//! name, parameters, result, description and function. Everything else is derived from the rows:
//!
//! | what | where |
//! |---|---|
//! | paths of the HTTP API, dispatch, and validation of every parameter before a function is called | `route.rs`, `api.rs`, [`Arguments`] |
//! | OpenAPI document, JSON schema | `openapi.rs`, [`table_schema()`] |
//! | reference as Markdown, `tenmil get --markdown` | [`reference_markdown()`] |
//! | validation, completion and tables of the client | [`parse_command_line_words`], [`shell_completion`], [`format_result()`] |
//!
//! A new method is one new row in [`methods`].
//!
//! `api.rs` answers a request without I/O. [`RpcServer`] connects it to sockets, by hyper on a thread of
//! its own, which sleeps while idle; [`RpcClient`] is a blocking client. Methods read a
//! [`ProcessParts`], which the serving program assembles.
//!
//! [`metrics`] renders the counters of a process for Prometheus; [`OtlpExport`] has them and spans sent to an
//! OpenTelemetry collector.
//!
//! The configuration of a target is one declarative file: [`target_config`].

#![forbid(unsafe_code)]

mod api;
mod arguments;
mod client;
mod deferred_reply;
mod error;
mod etcd_store;
mod event;
pub mod fuzz;
mod group_session;
mod group_store;
mod http_response;
mod json_schema;
mod method;
pub mod methods;
pub mod metrics;
mod openapi;
mod otlp;
mod page_files;
mod param_type;
mod passed_fd;
mod percent_encoding;
pub mod pool_commands;
mod process_parts;
mod readiness;
mod reference_doc;
mod result_type;
mod results_for_people;
mod route;
mod server;
mod shell_completion;
mod spelling_suggestion;
mod strict_json;
pub mod target_config;
mod tls;

pub use arguments::{Argument, Arguments, parse_command_line_words};
pub use client::{ControlEndpoint, HttpCredentials, RpcClient};
pub use deferred_reply::DeferredReplySlot;
pub use error::{ErrorCode, RpcError};
pub use etcd_store::{EtcdStore, EtcdUrl, EtcdWatch};
pub use event::{Event, EventKind, EventReceiver, EventSender, event_channel};
pub use group_session::{GroupSession, GroupThreads};
pub use group_store::{GroupStoreUri, OpenedStore, StoreWatch};
pub use json_schema::table_schema;
pub use method::{CallContext, Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
pub use methods::{
    ConfigurationAction, ConfigurationChange, ConfigurationRequest, CopyProgress, DeviceControls,
    EventRelay, NbdExports, NvmeConnections, ProgramInfo, RateLimits, ReactorsSource,
    SchedulerSource, ServedConfiguration, ServedDevice, ServedDevices, ServedNamespace, TABLE,
    TargetConfiguration, parse_slow_io, subscribe_path_events,
};
pub use otlp::{HAS_OTLP, OtlpCounters, OtlpEndpoint, OtlpExport, OtlpSignal};
pub use param_type::ParamType;
pub use passed_fd::PassedFd;
pub use process_parts::ProcessParts;
pub use readiness::Readiness;
pub use reference_doc::reference_markdown;
pub use result_type::{FieldSchema, ResultType};
pub use results_for_people::format_result;
pub use server::{ControlListeners, ControlToken, RpcServer, ServerError};
pub use shell_completion::complete_last_word;
pub use tls::{ControlCertificate, ControlTls, HAS_CONTROL_TLS};
