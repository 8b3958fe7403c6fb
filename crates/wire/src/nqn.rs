//! NVMe Qualified Names: names of hosts and subsystems (Base 2.1 §4.7).

use core::fmt;

/// Maximum length of a name, in bytes of UTF-8 (Base 2.1 §4.7).
pub const LEN_MAX: usize = 223;

/// Length of a name field in a structure, including zero padding (Base 2.1 §4.7).
pub const FIELD_BYTES: usize = 256;

/// Well-known name of the discovery subsystem (Base 2.1 §3.1.3.3).
pub const DISCOVERY: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Prefix of a name made from a UUID (Base 2.1 §4.7).
pub const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// First syntax error of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NqnError {
    /// The length is not permitted, or the name is not terminated within its field.
    Length(usize),
    /// Not UTF-8.
    NotUtf8,
    /// A character that is not permitted.
    Character(char),
    /// It does not begin with `nqn.`, a year, a month and a domain.
    Form,
    /// The UUID prefix is not followed by a UUID.
    Uuid,
    /// Something other than zeros follows the name.
    Padding,
}

impl fmt::Display for NqnError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(found) => {
                write!(out, "NQN has {found} bytes, expected 1 to {LEN_MAX} and a zero behind them")
            }
            Self::NotUtf8 => out.write_str("NQN is not UTF-8"),
            Self::Character(found) => {
                write!(
                    out,
                    "NQN holds {found:?}, expected no space and no control or format character"
                )
            }
            Self::Form => out.write_str("NQN does not begin with nqn.YYYY-MM. and a domain"),
            Self::Uuid => write!(out, "NQN begins with {UUID_PREFIX} and no UUID follows"),
            Self::Padding => out.write_str("NQN is followed by something else than zeros"),
        }
    }
}

impl core::error::Error for NqnError {}

/// Parses the name in a field of a structure.
pub fn parse_nqn_field(field: &[u8; FIELD_BYTES]) -> Result<&str, NqnError> {
    let end = field.iter().position(|&byte| byte == 0).ok_or(NqnError::Length(FIELD_BYTES))?;
    let (name, rest) = field.split_at(end);
    if rest.iter().any(|&byte| byte != 0) {
        return Err(NqnError::Padding);
    }
    let name = core::str::from_utf8(name).map_err(|_| NqnError::NotUtf8)?;
    check_nqn(name).map(|()| name)
}

/// Parses a host name in a field of a structure. Host names only distinguish hosts, so any text is
/// accepted, and bytes after its end are ignored.
pub fn parse_host_nqn_field(field: &[u8; FIELD_BYTES]) -> Result<&str, NqnError> {
    let end = field.iter().position(|&byte| byte == 0).ok_or(NqnError::Length(FIELD_BYTES))?;
    let name = core::str::from_utf8(&field[..end]).map_err(|_| NqnError::NotUtf8)?;
    check_host_nqn(name).map(|()| name)
}

/// Rejects a host name that could be confused with another one in a line or a list: with spaces,
/// control characters, or characters that have no width or change the text direction. The
/// specification requires UTF-8 (Base 2.1 §4.7) and forbids none of these.
pub fn check_host_nqn(name: &str) -> Result<(), NqnError> {
    if name.is_empty() || name.len() > LEN_MAX {
        return Err(NqnError::Length(name.len()));
    }
    let is_foreign = |letter: &char| {
        letter.is_whitespace() || letter.is_control() || is_format_character(*letter)
    };
    name.chars().find(is_foreign).map_or(Ok(()), |foreign| Err(NqnError::Character(foreign)))
}

/// Whether a character has no width or changes the text direction (Unicode 16, general category
/// Cf).
fn is_format_character(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
        | '\u{e0000}'..='\u{e007f}')
}

/// Validates a name of a host or subsystem.
pub fn check_nqn(name: &str) -> Result<(), NqnError> {
    check_host_nqn(name)?;
    if !has_date_and_domain(name) {
        return Err(NqnError::Form);
    }
    match name.strip_prefix(UUID_PREFIX) {
        Some(uuid) if !is_uuid(uuid) => Err(NqnError::Uuid),
        _ => Ok(()),
    }
}

/// Whether a name has the form `nqn.2014-08.org.example`, optionally followed by `:` and any text.
fn has_date_and_domain(name: &str) -> bool {
    let Some(rest) = name.strip_prefix("nqn.") else { return false };
    let Some((date, rest)) = rest.split_once('.') else { return false };
    let domain = rest.split_once(':').map_or(rest, |(domain, _)| domain);
    let &[y0, y1, y2, y3, b'-', m0, m1] = date.as_bytes() else { return false };
    let month = u32::from(m0.wrapping_sub(b'0')) * 10 + u32::from(m1.wrapping_sub(b'0'));
    let is_digit = |byte: u8| byte.is_ascii_digit();
    [y0, y1, y2, y3, m0, m1].into_iter().all(is_digit)
        && (1..=12).contains(&month)
        && domain.split('.').all(|label| !label.is_empty())
}

/// `11111111-2222-3333-4444-555555555555`.
fn is_uuid(text: &str) -> bool {
    let groups = text.split('-').map(str::len);
    groups.eq([8, 4, 4, 4, 12]) && text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::{
        DISCOVERY, FIELD_BYTES, LEN_MAX, NqnError, check_nqn, parse_host_nqn_field, parse_nqn_field,
    };

    fn nqn_field(name: &[u8]) -> [u8; FIELD_BYTES] {
        let mut field = [0; FIELD_BYTES];
        field[..name.len()].copy_from_slice(name);
        field
    }

    #[test]
    fn each_nqn_format_is_accepted() {
        let longest = format!("nqn.2014-08.org.example:{}", "x".repeat(LEN_MAX - 24));
        for name in [
            DISCOVERY,
            "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-55555555aAfF",
            "nqn.2001-12.com.example:nvme.host.sys.xyz",
            "nqn.2019-01.a:",
            &longest,
        ] {
            assert_eq!(check_nqn(name), Ok(()), "{name}");
            assert_eq!(parse_nqn_field(&nqn_field(name.as_bytes())), Ok(name));
        }
    }

    #[test]
    fn invalid_nqn_is_rejected_with_its_first_error() {
        let too_long = format!("nqn.2014-08.org.example:{}", "x".repeat(LEN_MAX - 23));
        for (name, why) in [
            ("", NqnError::Length(0)),
            (too_long.as_str(), NqnError::Length(LEN_MAX + 1)),
            ("nqn.2014-08.org.a:b c", NqnError::Character(' ')),
            ("nqn.2014-08.org.a:\u{7}", NqnError::Character('\u{7}')),
            ("iqn.2014-08.org.a", NqnError::Form),
            ("nqn.2014-13.org.a", NqnError::Form),
            ("nqn.2014-00.org.a", NqnError::Form),
            ("nqn.14-08.org.a", NqnError::Form),
            ("nqn.2014-08.", NqnError::Form),
            ("nqn.2014-08.org..a", NqnError::Form),
            ("nqn.2014-08", NqnError::Form),
            ("nqn.2014-08.org.nvmexpress:uuid:", NqnError::Uuid),
            ("nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-5555", NqnError::Uuid),
            (
                "nqn.2014-08.org.nvmexpress:uuid:g1111111-2222-3333-4444-555555555555",
                NqnError::Uuid,
            ),
        ] {
            assert_eq!(check_nqn(name), Err(why), "{name}");
            assert!(!why.to_string().is_empty());
        }
    }

    #[test]
    fn nqn_field_is_zero_terminated_and_zero_padded() {
        assert_eq!(parse_nqn_field(&[b'n'; FIELD_BYTES]), Err(NqnError::Length(FIELD_BYTES)));
        assert_eq!(parse_nqn_field(&[0; FIELD_BYTES]), Err(NqnError::Length(0)));
        let mut late = nqn_field(DISCOVERY.as_bytes());
        late[FIELD_BYTES - 1] = 1;
        assert_eq!(parse_nqn_field(&late), Err(NqnError::Padding));
        assert_eq!(parse_nqn_field(&nqn_field(b"nqn.2014-08.org.a:\xff")), Err(NqnError::NotUtf8));
    }

    /// `evil\u{202e}tsoh` is shown as `evilhost`.
    #[test]
    fn nqn_with_control_or_format_characters_is_rejected() {
        for letter in
            ['\u{202e}', '\u{2066}', '\u{200b}', '\u{feff}', '\u{ad}', '\u{e0041}', '\u{85}']
        {
            let (name, host) = (format!("nqn.2014-08.org.a:b{letter}c"), format!("b{letter}c"));
            assert_eq!(check_nqn(&name), Err(NqnError::Character(letter)), "{letter:?}");
            assert_eq!(
                parse_host_nqn_field(&nqn_field(host.as_bytes())),
                Err(NqnError::Character(letter))
            );
            let shown = NqnError::Character(letter).to_string();
            assert!(!shown.contains(letter), "{shown}");
        }
        assert_eq!(check_nqn("nqn.2014-08.org.example:größe-一"), Ok(()));
    }

    #[test]
    fn host_nqn_may_be_any_text() {
        let longest = "x".repeat(LEN_MAX);
        for name in
            ["hostnqn", "iqn.1994-05.com.redhat:1", "nqn.2014-08.org.nvmexpress:uuid:me", &longest]
        {
            let mut field = nqn_field(name.as_bytes());
            assert_eq!(parse_host_nqn_field(&field), Ok(name));
            field[FIELD_BYTES - 1] = b'?';
            assert_eq!(
                parse_host_nqn_field(&field),
                Ok(name),
                "what lies behind it is not looked at"
            );
        }
        assert_eq!(parse_host_nqn_field(&[b'n'; FIELD_BYTES]), Err(NqnError::Length(FIELD_BYTES)));
        assert_eq!(parse_host_nqn_field(&[0; FIELD_BYTES]), Err(NqnError::Length(0)));
        let too_long = nqn_field(&[b'x'; LEN_MAX + 1]);
        assert_eq!(parse_host_nqn_field(&too_long), Err(NqnError::Length(LEN_MAX + 1)));
        assert_eq!(parse_host_nqn_field(&nqn_field(b"host\n")), Err(NqnError::Character('\n')));
        assert_eq!(parse_host_nqn_field(&nqn_field(b"h\xff")), Err(NqnError::NotUtf8));
    }
}
