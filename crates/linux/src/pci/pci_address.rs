//! PCI addresses.

use std::fmt;
use std::str::FromStr;

/// Address of a function on the PCI bus: `0000:5e:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// The text is not a PCI address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseAddressError {
    /// Given text.
    pub found: String,
}

impl PciAddress {
    /// Domain. Domains created by a driver (such as VMD) are above `0xffff`.
    pub const fn domain(self) -> u32 {
        self.domain
    }
}

impl FromStr for PciAddress {
    type Err = ParseAddressError;

    /// Parses `0000:5e:00.0`, and `5e:00.0` for domain 0.
    fn from_str(text: &str) -> Result<Self, ParseAddressError> {
        parse_address(text).ok_or_else(|| ParseAddressError { found: text.into() })
    }
}

fn parse_address(text: &str) -> Option<PciAddress> {
    let (place, function) = text.rsplit_once('.')?;
    let mut fields = place.rsplit(':');
    let (device, bus) = (parse_hex(fields.next()?, 2)?, parse_hex(fields.next()?, 2)?);
    let domain = fields.next().map_or(Some(0), |field| parse_hex(field, 8))?;
    let function = parse_hex(function, 1).filter(|function| *function < 8)?;
    let device = Some(device).filter(|device| *device < 32)?;
    let byte = |number: u32| u8::try_from(number).ok();
    fields.next().is_none().then_some(PciAddress {
        domain,
        bus: byte(bus)?,
        device: byte(device)?,
        function: byte(function)?,
    })
}

fn parse_hex(text: &str, digits_max: usize) -> Option<u32> {
    let is_plain = !text.is_empty() && text.len() <= digits_max;
    let is_hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u32::from_str_radix(text, 16).ok().filter(|_| is_plain && is_hex)
}

impl fmt::Display for PciAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(out, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl fmt::Display for ParseAddressError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "`{}` is not a PCI address, expected one such as 0000:5e:00.0", self.found)
    }
}

impl std::error::Error for ParseAddressError {}

#[cfg(test)]
mod tests {
    use super::PciAddress;

    #[test]
    fn address_parses_with_and_without_domain() {
        for (text, shown) in [
            ("0000:5e:00.0", "0000:5e:00.0"),
            ("5E:1f.7", "0000:5e:1f.7"),
            ("10000:01:00.0", "10000:01:00.0"),
            ("ffffffff:ff:1f.7", "ffffffff:ff:1f.7"),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), shown);
        }
        assert_eq!("10000:01:00.0".parse::<PciAddress>().unwrap().domain(), 0x10000);
    }

    #[test]
    fn invalid_address_is_rejected_by_name() {
        for text in [
            "",
            "nvme0",
            "/dev/nvme0n1",
            "5e:00",
            "5e:00.8",
            "5e:20.0",
            "05e:00.0",
            "+e:00.0",
            "0:0:5e:00.0",
            "5e:00.0 ",
            "5e:.0",
            ":5e:00.0",
        ] {
            let refused = text.parse::<PciAddress>().unwrap_err().to_string();
            let expected =
                format!("`{text}` is not a PCI address, expected one such as 0000:5e:00.0");
            assert_eq!(refused, expected);
        }
    }
}
