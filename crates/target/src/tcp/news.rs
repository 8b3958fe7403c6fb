//! What has happened to connections, for people and programs.

use std::collections::VecDeque;
use std::fmt;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// Somebody has come.
    Connected {
        /// The connection's number, which is never used again.
        connection: u64,
        /// Who.
        peer: String,
    },
    /// A host has a controller.
    Associated {
        /// The number of its admin connection.
        connection: u64,
        /// Who.
        peer: String,
        /// The host's NVMe Qualified Name.
        host: String,
        /// The subsystem's.
        subsystem: String,
        /// The controller's number.
        cntlid: u16,
    },
    /// A Connect was refused.
    Refused {
        /// The connection's number.
        connection: u64,
        /// Who.
        peer: String,
        /// Why: what was found and what was expected.
        why: String,
    },
    /// Somebody has gone.
    Disconnected {
        /// The connection's number.
        connection: u64,
        /// Who.
        peer: String,
        /// Why.
        reason: Reason,
    },
    /// Something that a peer has done and that is worth a line. Peers decide how often.
    Notice(String),
    /// Something went wrong, in a line. No peer decides how often.
    Trouble(String),
}

/// News that nobody has read. There is a limit: peers can cause more than anybody reads.
#[derive(Debug, Default)]
pub(super) struct Unread {
    news: VecDeque<News>,
    /// How many were dropped and not reported.
    dropped: u64,
}

/// News that are kept for whoever reads them.
const UNREAD_MAX: usize = 1024;

impl Unread {
    /// Adds one. If there are too many, the oldest that a peer has caused is dropped, so that no peer
    /// decides what is read of the target's own troubles.
    pub(super) fn push(&mut self, news: News) {
        if self.news.len() >= UNREAD_MAX {
            let oldest = self.news.iter().position(News::is_of_peer).unwrap_or(0);
            self.news.remove(oldest);
            self.dropped += 1;
        }
        self.news.push_back(news);
    }

    /// The oldest, and how many were dropped once there are no others.
    pub(super) fn next(&mut self) -> Option<News> {
        self.news.pop_front().or_else(|| {
            let dropped = std::mem::take(&mut self.dropped);
            let text = format!("{dropped} events of connections were dropped: they came too fast");
            (dropped > 0).then_some(News::Notice(text))
        })
    }
}

impl News {
    /// Whether a peer has caused it, and can cause any number of its kind.
    const fn is_of_peer(&self) -> bool {
        !matches!(self, Self::Trouble(_))
    }
}

/// Why a connection has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The peer has closed it.
    Closed,
    /// The host has said so, with Disconnect.
    Said,
    /// What came is refused, as this says.
    Refused(String),
    /// The peer has refused what it got, as this says.
    Terminated(String),
    /// The peer took too long for this.
    TooSlow(&'static str),
    /// The stream failed, as whoever carries it says.
    Broken(String),
    /// The host has not been heard of for its keep-alive time-out.
    KeepAliveExpired,
    /// The host has not enabled its controller in time.
    NotEnabled,
    /// Its association has ended, or its controller was reset.
    AssociationEnded,
    /// Its host has had the controller reset by another one.
    Reset,
    /// The target made a mistake: it asked its own end of the connection for what is not possible.
    Internal(String),
    /// The server ends.
    ServerEnds,
}

impl Reason {
    /// It in a word that does not change, for programs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Said => "said",
            Self::Refused(_) => "refused",
            Self::Terminated(_) => "terminated",
            Self::TooSlow(_) => "too-slow",
            Self::Broken(_) => "broken",
            Self::KeepAliveExpired => "keep-alive-expired",
            Self::NotEnabled => "not-enabled",
            Self::AssociationEnded => "association-ended",
            Self::Reset => "reset",
            Self::Internal(_) => "internal-error",
            Self::ServerEnds => "server-ends",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => out.write_str("the host has closed it"),
            Self::Said => out.write_str("the host has disconnected"),
            Self::Refused(why) => write!(out, "the host sent what is refused: {why}"),
            Self::Terminated(why) => write!(out, "the host has terminated it: {why}"),
            Self::TooSlow(what) => write!(out, "the host took too long to {what}"),
            Self::Broken(why) => write!(out, "the stream failed: {why}"),
            Self::KeepAliveExpired => {
                out.write_str("the host was not heard of for its keep-alive time-out")
            }
            Self::NotEnabled => out.write_str("the host did not enable its controller in time"),
            Self::AssociationEnded => out.write_str("its association has ended"),
            Self::Reset => out.write_str("its host had it reset by another controller"),
            Self::Internal(what) => {
                write!(out, "an error of this target, which should be reported: {what}")
            }
            Self::ServerEnds => out.write_str("the server ends"),
        }
    }
}

impl fmt::Display for News {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connected { connection, peer } => {
                write!(out, "connection {connection}: {peer} has come")
            }
            Self::Associated { connection, peer, host, subsystem, cntlid } => write!(
                out,
                "connection {connection}: {peer} is {host} and has controller {cntlid} of {subsystem}"
            ),
            Self::Refused { connection, peer, why } => {
                write!(out, "connection {connection}: {peer} is refused: {why}")
            }
            Self::Disconnected { connection, peer, reason } => {
                write!(out, "connection {connection}: {peer} has gone: {reason}")
            }
            Self::Notice(text) | Self::Trouble(text) => out.write_str(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{News, UNREAD_MAX, Unread};

    fn refused(connection: u64) -> News {
        News::Refused { connection, peer: "192.0.2.1:5".into(), why: "no such subsystem".into() }
    }

    #[test]
    fn no_flood_of_a_peer_drops_a_trouble_and_what_it_drops_is_counted() {
        let mut unread = Unread::default();
        unread.push(News::Trouble("a medium has not answered".into()));
        (0..3 * UNREAD_MAX as u64).for_each(|connection| unread.push(refused(connection)));
        assert_eq!(unread.next(), Some(News::Trouble("a medium has not answered".into())));
        let read = std::iter::from_fn(|| unread.next()).collect::<Vec<_>>();
        let (last, read) = read.split_last().unwrap();
        assert_eq!(
            (read.len(), read[0].clone()),
            (UNREAD_MAX - 1, refused(2 * UNREAD_MAX as u64 + 1))
        );
        let News::Notice(text) = last else { panic!("{last:?}") };
        assert!(text.starts_with(&format!("{} events", 2 * UNREAD_MAX + 1)), "{text}");
        assert_eq!(unread.next(), None, "it is reported once");
    }

    #[test]
    fn troubles_without_end_take_no_more_memory() {
        let mut unread = Unread::default();
        (0..2 * UNREAD_MAX).for_each(|count| unread.push(News::Trouble(count.to_string())));
        assert_eq!(unread.next(), Some(News::Trouble(UNREAD_MAX.to_string())));
        assert_eq!(unread.news.len(), UNREAD_MAX - 1);
    }
}
