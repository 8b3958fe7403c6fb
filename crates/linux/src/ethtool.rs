//! Queue, ring and interrupt settings of a network card (ethtool), and two offload switches.
//!
//! ```text
//!   struct ethtool_ringparam   9 words   0 command  1 rx max  4 tx max   5 rx      8 tx
//!   struct ethtool_channels    9 words   0 command  4 combined max       8 combined
//!   struct ethtool_coalesce   23 words   0 command  1 rx-usecs           10 adaptive-rx
//! ```
//!
//! All three consist of 32-bit words (`linux/ethtool.h`); a switch is a command and a word. Queries
//! change nothing and need no privilege.

use rustix::net::{AddressFamily, SocketType, socket};

use std::os::fd::{AsRawFd, OwnedFd};

use crate::Errno;

/// Ring sizes of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicRings {
    /// Receive descriptors.
    pub receive: u32,
    /// Maximum number of receive descriptors.
    pub receive_max: u32,
    /// Transmit descriptors.
    pub send: u32,
    /// Maximum number of transmit descriptors.
    pub send_max: u32,
}

/// Queues of a card, each with an interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicChannels {
    /// Combined (receive and transmit) queues in use.
    pub combined: u32,
    /// Maximum number of combined queues.
    pub combined_max: u32,
}

/// Interrupt coalescing of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NicCoalescing {
    /// Delay of the interrupt after a received packet, in microseconds.
    pub receive_us: u32,
    /// Whether the card adapts the delay.
    pub is_adaptive: bool,
}

const RINGS: (u32, usize) = (0x10, 9);
const CHANNELS: (u32, usize) = (0x3c, 9);
const COALESCING: (u32, usize) = (0x0e, 23);
const SET_TSO: u32 = 0x1f;
const SET_GRO: u32 = 0x2c;
/// Size of the longest structure, in words.
const WORDS: usize = 23;
const _: () = assert!(RINGS.1 <= WORDS && CHANNELS.1 <= WORDS && COALESCING.1 <= WORDS);

/// Reads the ring sizes of `card`.
pub fn nic_rings(card: &str) -> Result<NicRings, Errno> {
    let words = query_words(card, RINGS)?;
    let (receive, receive_max) = (words[5], words[1]);
    Ok(NicRings { receive, receive_max, send: words[8], send_max: words[4] })
}

/// Reads the queue counts of `card`.
pub fn nic_channels(card: &str) -> Result<NicChannels, Errno> {
    let words = query_words(card, CHANNELS)?;
    Ok(NicChannels { combined: words[8], combined_max: words[4] })
}

/// Reads the interrupt coalescing of `card`.
pub fn nic_coalescing(card: &str) -> Result<NicCoalescing, Errno> {
    let words = query_words(card, COALESCING)?;
    Ok(NicCoalescing { receive_us: words[1], is_adaptive: words[10] != 0 })
}

/// Switches generic receive offload (GRO) of `card`.
pub fn set_gro(card: &str, is_on: bool) -> Result<(), Errno> {
    set_flag(card, SET_GRO, is_on)
}

/// Switches TCP segmentation offload (TSO) of `card`.
pub fn set_tso(card: &str, is_on: bool) -> Result<(), Errno> {
    set_flag(card, SET_TSO, is_on)
}

fn set_flag(card: &str, command: u32, is_on: bool) -> Result<(), Errno> {
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    let mut words = [0; WORDS];
    (words[0], words[1]) = (command, u32::from(is_on));
    ethtool_ioctl(&any, card, &mut words)
}

fn query_words(card: &str, (command, _): (u32, usize)) -> Result<[u32; WORDS], Errno> {
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    let mut words = [0; WORDS];
    words[0] = command;
    ethtool_ioctl(&any, card, &mut words)?;
    Ok(words)
}

fn ethtool_ioctl(any: &OwnedFd, card: &str, words: &mut [u32; WORDS]) -> Result<(), Errno> {
    let mut name = [0; libc::IFNAMSIZ];
    // One byte is reserved for the terminating zero.
    if card.is_empty() || card.len() >= name.len() {
        return Err(Errno::NODEV);
    }
    for (to, from) in name.iter_mut().zip(card.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let data = words.as_mut_ptr().cast();
    let request =
        libc::ifreq { ifr_name: name, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data: data } };
    // SAFETY: the descriptor is an open socket; `request` outlives the call and is what SIOCETHTOOL
    // expects: a zero-terminated name, and a pointer to `words`, which is exclusively borrowed and
    // large enough for the result of every command in this file.
    let answer =
        unsafe { libc::ioctl(any.as_raw_fd(), libc::SIOCETHTOOL as _, &raw const request) };
    if answer < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{nic_channels, nic_coalescing, nic_rings};
    use crate::Errno;

    #[test]
    fn unknown_card_or_unsupported_query_is_an_error() {
        for card in ["no such card", "", "a name that is much too long for a card"] {
            assert_eq!(nic_rings(card), Err(Errno::NODEV), "{card}");
        }
        assert_eq!(nic_rings("lo"), Err(Errno::OPNOTSUPP));
        assert_eq!(nic_coalescing("lo"), Err(Errno::OPNOTSUPP));
        assert_eq!(nic_channels("lo"), Err(Errno::OPNOTSUPP));
    }
}
