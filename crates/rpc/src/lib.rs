//! Control interface: a table of methods, and the socket that serves it.
//!
//! A running process is queried and changed with methods. Each is one row of a [`MethodRegistry`]:
//! name, parameters, result, description and function. Everything else is derived from the rows:
//!
//! | what | where |
//! |---|---|
//! | dispatch, and validation of every parameter before a function is called | [`Request`], [`Arguments`] |
//! | JSON schema | [`table_schema()`] |
//! | reference as Markdown, `tenmil get --markdown` | [`reference_markdown()`] |
//! | validation, completion and tables of the client | [`parse_command_line_words`], [`shell_completion`], [`format_result()`] |
//!
//! A new method is one new row in [`methods`].
//!
//! A connection carries JSON lines. [`Session`] is the server side and [`ReplyParser`] the client
//! side; both are protocol state machines without I/O. [`RpcServer`] and [`RpcClient`] connect them to
//! sockets. The server has a thread of its own, which sleeps while idle. Methods read a
//! [`ProcessParts`], which the serving program assembles.
//!
//! [`metrics`] renders the counters of a process for Prometheus.
//!
//! The configuration of a target is one declarative file: [`target_config`].

#![forbid(unsafe_code)]

mod arguments;
mod client;
mod deferred_reply;
mod error;
mod event;
pub mod fuzz;
mod json_schema;
mod method;
pub mod methods;
pub mod metrics;
mod param_type;
mod passed_fd;
pub mod pool_commands;
mod process_parts;
mod reference_doc;
mod reply_parser;
mod request;
mod result_text;
mod result_type;
mod server;
mod session;
mod shell_completion;
mod spelling_suggestion;
mod strict_json;
pub mod target_config;

pub use arguments::{Argument, Arguments, parse_command_line_words};
pub use client::RpcClient;
pub use deferred_reply::DeferredReplySlot;
pub use error::{ErrorCode, RpcError};
pub use event::{Event, EventKind, EventReceiver, EventSender, event_channel};
pub use json_schema::table_schema;
pub use method::{CallContext, Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
pub use methods::{
    ConfigurationAction, ConfigurationChange, ConfigurationRequest, CopyProgress, DeviceControls,
    EventRelay, NbdExports, NvmeConnections, ProgramInfo, ReactorsSource, SchedulerSource,
    ServedConfiguration, ServedDevice, ServedDevices, ServedNamespace, TABLE, TargetConfiguration,
    subscribe_path_events,
};
pub use param_type::ParamType;
pub use passed_fd::PassedFd;
pub use process_parts::ProcessParts;
pub use reference_doc::reference_markdown;
pub use reply_parser::{Reply, ReplyParser};
pub use request::Request;
pub use result_text::format_result;
pub use result_type::{FieldSchema, ResultType};
pub use server::{RpcServer, ServerError};
pub use session::{CloseReason, LineResult, ServerContext, Session, SessionLimits};
pub use shell_completion::complete_last_word;
