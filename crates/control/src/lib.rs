//! One table of methods, and the socket it is served on.
//!
//! A running program is asked and told things by methods. Each is one row of a [`Table`]: its name,
//! its parameters, what it answers, what it is for, and the function that does it. Everything else is
//! made from the rows:
//!
//! | what | where |
//! |---|---|
//! | dispatch, and the check of every parameter before a row's function sees it | [`Request`], [`Arguments`] |
//! | the schema, for programs | [`schema()`] |
//! | `docs/control.md`, for people | [`document()`] |
//! | the client's checks, completion and tables | [`words`], [`candidates`], [`show()`] |
//!
//! So a new method is a new row in [`methods`], and nothing else.
//!
//! A connection is JSON lines. [`Session`] is the serving half and [`Replies`] the asking half; both
//! take bytes and give bytes and have never seen a socket. [`Server`] and [`Client`] are the few
//! lines around them that have. The server has a thread of its own, which sleeps until somebody
//! wants something; what a row answers from is a [`State`], put together by the program that serves.

//!
//! What a target serves to whom is one declarative file: [`configuration`].

#![forbid(unsafe_code)]

mod arguments;
mod client;
mod complete;
pub mod configuration;
mod document;
mod event;
pub mod fuzz;
mod json;
mod kind;
mod later;
mod method;
pub mod methods;
pub mod orders;
mod passed;
mod refusal;
mod reply;
mod request;
mod schema;
mod server;
mod session;
mod shape;
mod show;
mod state;
mod suggest;

pub use arguments::{Argument, Arguments, words};
pub use client::Client;
pub use complete::candidates;
pub use document::document;
pub use event::{Announcements, Announcer, Event, EventKind, announcements};
pub use kind::Kind;
pub use later::Later;
pub use method::{Call, Method, Need, Parameter, Table, Verb};
pub use methods::{
    Balancing, Copying, DevicePaths, Devices, Exports, PathNews, Paths, Process, Queues, Reactors,
    Relay, Running, TABLE,
};
pub use passed::Passed;
pub use refusal::{Code, Refusal};
pub use reply::{Replies, Reply};
pub use request::Request;
pub use schema::schema;
pub use server::{Refused, Server};
pub use session::{Ending, Limits, Served, Session, Step};
pub use shape::{Field, Shape};
pub use show::show;
pub use state::State;
