//! Control interface: a table of methods, and the socket that serves it.
//!
//! A running process is queried and changed with methods. Each is one row of a [`MethodRegistry`]:
//! name, parameters, result, description and function. Everything else is derived from the rows:
//!
//! | what | where |
//! |---|---|
//! | dispatch, and validation of every parameter before a function is called | [`Request`], [`Arguments`] |
//! | JSON schema | [`schema()`] |
//! | reference as Markdown, `tenmil get --markdown` | [`document()`] |
//! | validation, completion and tables of the client | [`words`], [`candidates`], [`show()`] |
//!
//! A new method is one new row in [`methods`].
//!
//! A connection carries JSON lines. [`Session`] is the server side and [`ReplyParser`] the client
//! side; both are protocol state machines without I/O. [`Server`] and [`Client`] connect them to
//! sockets. The server has a thread of its own, which sleeps while idle. Methods read a
//! [`ServerState`], which the serving program assembles.
//!
//! The configuration of a target is one declarative file: [`config`].

#![forbid(unsafe_code)]

mod arguments;
mod client;
mod complete;
pub mod config;
mod deferred;
mod did_you_mean;
mod error;
mod event;
pub mod fuzz;
mod json;
mod method;
pub mod methods;
mod param_type;
mod passed_fd;
pub mod pool_commands;
mod reference_doc;
mod reply;
mod request;
mod result_type;
mod schema;
mod server;
mod session;
mod state;
mod table;

pub use arguments::{Argument, Arguments, words};
pub use client::Client;
pub use complete::candidates;
pub use deferred::DeferredReply;
pub use error::{Code, RpcError};
pub use event::{Event, EventKind, EventReceiver, EventSender, announcements};
pub use method::{CallContext, Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
pub use methods::{
    CopyProgress, Devices, EventRelay, Exports, NvmeConnections, ProgramInfo, Reactors,
    SchedulerSource, TABLE, announce_path_changes,
};
pub use param_type::ParamType;
pub use passed_fd::PassedFd;
pub use reference_doc::document;
pub use reply::{Reply, ReplyParser};
pub use request::Request;
pub use result_type::{FieldSchema, ResultType};
pub use schema::schema;
pub use server::{Server, ServerError};
pub use session::{CloseReason, Limits, ServerContext, Session, StepResult};
pub use state::ServerState;
pub use table::show;
