//! Escaping of untrusted text for terminals.

/// Escapes every character on which a terminal acts: control characters, and those that change the
/// direction of text or have no width.
#[must_use]
pub fn escape(text: &str) -> String {
    escape_where(text, is_terminal_control)
}

/// As [`escape`], but keeps line feeds.
#[must_use]
pub fn escape_lines(text: &str) -> String {
    escape_where(text, |character| character != '\n' && is_terminal_control(character))
}

/// Whether a terminal acts on a character: control characters, and those without width or with an
/// effect on direction (Unicode 16, general category Cf, and the line and paragraph separators).
#[must_use]
pub fn is_terminal_control(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}')
}

fn escape_where(text: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut plain = String::with_capacity(text.len());
    for character in text.chars() {
        match is_escaped(character) {
            true => plain.extend(character.escape_unicode()),
            false => plain.push(character),
        }
    }
    plain
}

/// A word of a command line, in single quotes if a shell would interpret it: bash, zsh or sh.
#[must_use]
pub fn quote_shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./+@%".contains(c);
    // zsh replaces a leading `=` and the name behind it by the path of a command.
    let is_plain = !word.is_empty() && !word.starts_with('=') && word.chars().all(plain);
    if is_plain { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// Size in powers of two: `64 MiB`.
pub fn format_size(bytes: u64) -> String {
    const UNITS: [(u32, &str); 5] =
        [(50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = UNITS.iter().find(|(shift, _)| bytes >> shift > 0);
    let Some((shift, name)) = unit else { return format!("{bytes} bytes") };
    let tenths = (u128::from(bytes) * 10) >> shift;
    match tenths % 10 {
        0 => format!("{} {name}", tenths / 10),
        part => format!("{}.{part} {name}", tenths / 10),
    }
}

#[cfg(test)]
mod tests {
    use super::{escape, escape_lines, quote_shell_word};

    #[test]
    fn terminal_control_characters_are_escaped() {
        assert_eq!(escape("a\u{1b}[2Jb\nc\u{9b}d"), "a\\u{1b}[2Jb\\u{a}c\\u{9b}d");
        assert_eq!(escape("x\u{202e}y\u{200b}z\u{7f}"), "x\\u{202e}y\\u{200b}z\\u{7f}");
        assert_eq!(escape("\u{2066}a\u{2069}\u{61c}"), "\\u{2066}a\\u{2069}\\u{61c}");
        assert_eq!(escape("Übung 一"), "Übung 一");
        assert_eq!(escape_lines("a\nb\r\u{202e}"), "a\nb\\u{d}\\u{202e}");
    }

    #[test]
    fn shell_word_is_quoted_if_necessary() {
        for word in ["perf", "-t", "/a/b.c", "tcp://[::1]:1/nqn.x:d/1", "emu:null?count=2", "=ls"] {
            let is_plain = !word.contains(['[', '?']) && word != "=ls";
            let expected = if is_plain { word.to_owned() } else { format!("'{word}'") };
            assert_eq!(quote_shell_word(word), expected);
        }
        assert_eq!(
            (quote_shell_word("it's"), quote_shell_word("")),
            (r"'it'\''s'".into(), "''".into())
        );
    }
}
