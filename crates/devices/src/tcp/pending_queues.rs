//! Queue pairs of a remote SSD that channels wait for: each is created as soon as the controller is
//! ready, however long that takes.

use tenmil_base::{Error, Instant, Span};
use tenmil_nvme_fabrics::{FabricsChannel, FabricsController};
use tenmil_nvme_host::{FastPathOptions, QueuePairOptions, QueueSizes, RequestError};

use super::name::TcpName;

/// The queue pairs.
pub(super) struct PendingQueues {
    wanted: Vec<PendingQueue>,
    next_ticket: u64,
    namespace: u32,
    depth: u32,
    retry: Span,
}

/// A queue pair.
struct PendingQueue {
    ticket: u64,
    /// The queue pair that is being created or has been.
    id: Option<u16>,
    /// Why it was refused, and when it is requested again.
    refused: Option<(Instant, String)>,
    /// No channel waits for it any more.
    is_closed: bool,
}

impl PendingQueues {
    pub(super) fn new(name: &TcpName) -> Self {
        let (namespace, depth) = (name.namespace, name.depth);
        let retry = name.options.policy.retry;
        Self { wanted: Vec::new(), next_ticket: 0, namespace, depth, retry }
    }

    /// One more is wanted.
    pub(super) fn open(&mut self) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.wanted.push(PendingQueue { ticket, id: None, refused: None, is_closed: false });
        ticket
    }

    /// One is not wanted any more. It is deleted once it has been created.
    pub(super) fn close(&mut self, ticket: u64) {
        for wanted in self.wanted.iter_mut().filter(|wanted| wanted.ticket == ticket) {
            wanted.is_closed = true;
        }
    }

    /// Has the controller create what is wanted, if it is ready, and delete what is not.
    pub(super) fn create(&mut self, now: Instant, remote: &mut FabricsController) {
        let Self { wanted, namespace, depth, retry, .. } = self;
        wanted.retain(|wanted| match wanted.id {
            // A queue pair goes with its queue.
            Some(id) if wanted.is_closed => {
                remote.take_queue(id, *namespace, QueueSizes::default()).is_none()
            }
            None => !wanted.is_closed,
            Some(_) => true,
        });
        let is_due = |wanted: &PendingQueue| {
            wanted.id.is_none() && wanted.refused.as_ref().is_none_or(|(at, _)| now >= *at)
        };
        for wanted in wanted.iter_mut().filter(|wanted| is_due(wanted)) {
            let controller = remote.controller();
            let most = controller.capabilities().map_or(2, |known| known.depth_max);
            let depth = (*depth + 1).clamp(2, most);
            let options =
                QueuePairOptions { depth, vector: None, techniques: FastPathOptions::default() };
            match controller.create_queue_pair(now, options) {
                Ok(id) => (wanted.id, wanted.refused) = (Some(id), None),
                // A queue pair that is being deleted frees an entry.
                Err(RequestError::QueueLimit { .. } | RequestError::NotReady) => {}
                Err(refusal) => wanted.refused = Some((now.after(*retry), refusal.to_string())),
            }
        }
    }

    /// The controller has not created a queue pair.
    pub(super) fn refused(&mut self, now: Instant, id: u16, why: &str) {
        if let Some(wanted) = self.wanted.iter_mut().find(|wanted| wanted.id == Some(id)) {
            wanted.id = None;
            wanted.refused = Some((now.after(self.retry), format!("a queue was refused: {why}")));
        }
    }

    /// A queue over the queue pair, once it has been created. The error has the reason why it was not.
    pub(super) fn take(
        &mut self,
        ticket: u64,
        remote: &mut FabricsController,
    ) -> Result<Option<FabricsChannel>, Error> {
        let found = self.wanted.iter().position(|wanted| wanted.ticket == ticket);
        let Some(at) = found else { return Ok(None) };
        let wanted = &self.wanted[at];
        if let Some((_, why)) = &wanted.refused {
            return Err(Error::environment(why.clone()));
        }
        let Some(id) = wanted.id else { return Ok(None) };
        let queue = remote.take_queue(id, self.namespace, QueueSizes::default());
        if queue.is_some() {
            self.wanted.swap_remove(at);
        }
        Ok(queue)
    }
}
