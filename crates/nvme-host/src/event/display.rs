//! Text of controller events.

use core::fmt;

use super::{Event, NamespaceError};

impl fmt::Display for Event {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready => out.write_str("the controller is ready"),
            Self::AdminCompleted(answer) => write!(out, "admin command: {}", answer.status),
            Self::QueuePairCreated { id } => write!(out, "queue pair {id} created"),
            Self::QueuePairRefused { id, status } => {
                write!(out, "queue pair {id} refused: {status}")
            }
            Self::RingInHostMemory { id, why } => {
                write!(out, "queue pair {id}: its submission queue is in host memory: {why}")
            }
            Self::QueuePairDeleted { id } => write!(out, "queue pair {id} deleted"),
            Self::CommandOverdue { queue, cid } => {
                write!(out, "command {cid} of queue {queue} has missed its deadline; aborting it")
            }
            Self::NamespaceAttached { id } => write!(out, "namespace {id} attached"),
            Self::NamespaceDetached { id } => write!(out, "namespace {id} detached"),
            Self::NamespaceResized { id, from_blocks, to_blocks } => {
                write!(out, "namespace {id} has {to_blocks} blocks, before {from_blocks}")
            }
            Self::NamespaceChanged { id } => write!(out, "namespace {id} changed"),
            Self::NamespaceUnusable { id, why } => write!(out, "namespace {id}: {why}"),
            Self::NamespacesIgnored { count } => write!(out, "{count} namespaces are not used"),
            Self::NamespaceListUnusable { why } => write!(out, "list of namespaces: {why}"),
            _ => self.fmt_state(out),
        }
    }
}

impl Event {
    fn fmt_state(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Health(_) => out.write_str("health warning: see SMART / Health Information"),
            Self::ErrorReported { .. } => {
                out.write_str("error that belongs to no command: see Error Information")
            }
            Self::FirmwareActivation => out.write_str("firmware is being activated"),
            Self::AccessChanged => out.write_str("ANA states of namespaces changed"),
            Self::Notice { log_page, .. } => write!(out, "notice: see log page {log_page:02x}h"),
            Self::EventConfigurationRefused { status, .. } => {
                write!(out, "Asynchronous Event Configuration refused: {status}")
            }
            Self::EventsRefused { status, left } => {
                write!(out, "Asynchronous Event Requests refused: {status}; {left} are outstanding")
            }
            Self::ResetStarted { cause } => write!(out, "controller reset: {cause}"),
            Self::Recovered => out.write_str("controller reset completed"),
            Self::QueuePairResumed { id } => write!(out, "queue pair {id} resumed"),
            Self::ShutDown { is_clean: true } => out.write_str("controller shut down"),
            Self::ShutDown { is_clean: false } => {
                out.write_str("controller disabled without a completed shutdown")
            }
            Self::Dead(error) => write!(out, "controller failed: {error}"),
            Self::Removed => out.write_str("controller removed"),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for NamespaceError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidData(lie) => write!(out, "invalid data: {lie}"),
            Self::IdentifyFailed(status) => write!(out, "Identify refused: {status}"),
            Self::CommandSet(_) => out.write_str("its command set is not NVM"),
        }
    }
}
