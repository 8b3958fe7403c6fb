//! Host NQNs as label values. Hosts choose them, so their number is bounded.

use std::collections::BTreeSet;

/// Largest number of hosts with series of their own in a process.
pub(super) const HOSTS_MAX: usize = 256;

/// Label value of all other hosts. It is no NQN.
pub(super) const OTHER_HOSTS: &str = "other";

/// Hosts that have series of their own: the first ones in the order of their names.
#[derive(Debug)]
pub(super) struct HostNames(BTreeSet<String>);

impl HostNames {
    /// Selects among these hosts.
    pub(super) fn new<'a>(hosts: impl Iterator<Item = &'a str>) -> Self {
        let all: BTreeSet<&str> = hosts.filter(|host| !host.is_empty()).collect();
        Self(all.into_iter().take(HOSTS_MAX).map(str::to_owned).collect())
    }

    /// Label value of a host. A host without an NQN is among the others.
    pub(super) fn label<'a>(&self, host: &'a str) -> &'a str {
        if self.0.contains(host) { host } else { OTHER_HOSTS }
    }
}

#[cfg(test)]
mod tests {
    use super::{HOSTS_MAX, HostNames, OTHER_HOSTS};

    #[test]
    fn hosts_beyond_the_limit_share_a_label() {
        let names: Vec<String> =
            (0..HOSTS_MAX + 10).map(|host| format!("nqn.h{host:04}")).collect();
        let hosts = HostNames::new(names.iter().rev().map(String::as_str).chain(["", "nqn.h0000"]));
        assert_eq!(hosts.label("nqn.h0000"), "nqn.h0000");
        assert_eq!(hosts.label(&names[HOSTS_MAX - 1]), names[HOSTS_MAX - 1]);
        assert_eq!(hosts.label(&names[HOSTS_MAX]), OTHER_HOSTS);
        assert_eq!(hosts.label(""), OTHER_HOSTS);
    }
}
