"""Result sets: written, continued, compared."""
